"""The names of metrics: which exist, by the code's own registries, and which a query uses."""

import re
import urllib.request
from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

WORDS = re.compile(r'"(?:[^"\\]|\\.)*"|\{|\}|\[[^\]]*\]|[a-zA-Z_:][a-zA-Z0-9_:]*')
FOREIGN = re.compile(r"(ray_|redis_|pmi_|up$)")


def used(query: str) -> set[str]:
    """Names of metrics in a query: words outside of strings and of label matchers that look like one."""
    found, depth = set(), 0
    for word in WORDS.findall(query):
        depth += (word == "{") - (word == "}")
        if depth == 0 and FOREIGN.match(word):
            found.add(word)
    return found


def series(text: str) -> set[str]:
    """Names of the series that a scrape may have, also of those with labels and no value yet."""
    found = set()
    for family in text_string_to_metric_families(text):
        if family.type == "counter":
            found.add(f"{family.name}_total")
        elif family.type == "histogram":
            found |= {f"{family.name}_{part}" for part in ("bucket", "count", "sum")}
        else:
            found.add(family.name)
    return found


def scrape(port: int) -> str:
    """What a live endpoint answers."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return str(answer.read().decode())


def registered(registry: CollectorRegistry) -> set[str]:
    """Names of the series of a registry."""
    from prometheus_client import generate_latest

    return series(generate_latest(registry).decode())


def on_ray(names: Iterable[str]) -> set[str]:
    """As Ray exports them."""
    return {f"ray_{name}" for name in names}
