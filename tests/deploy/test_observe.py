"""Alerts and dashboards: accepted by Prometheus, tested, explained, and asking only for metrics that exist."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from lm.machine import free_port
from lm.training.report import _Gauges
from serving.metrics import METRICS, PrometheusSink

from .metrics import on_ray, registered, scrape, series, used
from .schemas import DEPLOY, ROOT

OBSERVE = DEPLOY / "observe"
RULES = [rule for group in yaml.safe_load((OBSERVE / "rules.yml").read_text())["groups"] for rule in group["rules"]]
BOARDS = {path.stem: json.loads(path.read_text()) for path in sorted((OBSERVE / "grafana/dashboards").glob("*.json"))}


def promtool(*arguments: str) -> None:
    done = subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def queries() -> dict[str, str]:
    """Every query of a dashboard, and of its variables, by where it is."""
    found = {}
    for name, board in BOARDS.items():
        for panel in board["panels"]:
            for target in panel.get("targets", []):
                found[f"{name}: {panel['title']} {target['refId']}"] = target["expr"]
        for variable in board["templating"]["list"]:
            if variable["type"] == "query":
                asked = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
                assert asked, variable
                found[f"{name}: ${variable['name']}"] = asked[1]
    return found


# --- Prometheus' own checks ------------------------------------------------------------------------------------------


@pytest.mark.needs("promtool")
def test_promtool_accepts_rules_and_runs_their_tests() -> None:
    promtool("check", "rules", str(OBSERVE / "rules.yml"))
    promtool("test", "rules", str(OBSERVE / "rules-test.yml"))


@pytest.mark.needs("promtool")
@pytest.mark.parametrize("name", ["prometheus.yml", "prometheus-kubernetes.yml"])
def test_promtool_accepts_the_scrape_configuration(name: str, tmp_path: Path) -> None:
    config = yaml.safe_load((OBSERVE / name).read_text())
    for job in config[
        "scrape_configs"
    ]:  # Debian's promtool is built without Kubernetes' discovery: the rest of the job is checked
        if job.pop("kubernetes_sd_configs", None):
            job["static_configs"] = [{"targets": ["pod:1"]}]
    (tmp_path / "prometheus.yml").write_text(yaml.safe_dump(config))
    shutil.copy(OBSERVE / "rules.yml", tmp_path)
    promtool("check", "config", str(tmp_path / "prometheus.yml"))


@pytest.mark.needs("promtool")
def test_every_dashboard_query_is_promql(tmp_path: Path) -> None:
    plain = [re.sub(r"\$\w+", "x", query) for query in queries().values()]
    rules = [{"record": f"query:{number}", "expr": query} for number, query in enumerate(plain)]
    (tmp_path / "rules.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    promtool("check", "rules", str(tmp_path / "rules.yml"))


# --- alerts and the runbook --------------------------------------------------------------------------------------------


def test_every_alert_has_a_chapter_in_the_runbook_and_a_unit_test() -> None:
    names = [rule["alert"] for rule in RULES]
    chapters = re.findall(r"^## (\w+)$", (ROOT / "docs/runbook.md").read_text(), re.M)
    assert chapters == names
    tests = yaml.safe_load((OBSERVE / "rules-test.yml").read_text())["tests"]
    assert [test["name"] for test in tests] == names
    for test in tests:
        expected = [bool(case["exp_alerts"]) for case in test["alert_rule_test"]]
        assert {True, False} <= set(expected), f"{test['name']}: when it fires, and when not"
    for rule in RULES:
        assert rule["annotations"]["runbook"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("page", "ticket")


def test_dashboards_have_distinct_panels_that_do_not_overlap() -> None:
    assert sorted(BOARDS) == ["evaluation", "serving", "training"]
    for board in BOARDS.values():
        ids = [panel["id"] for panel in board["panels"]]
        assert len(ids) == len(set(ids))
        taken: set[tuple[int, int]] = set()
        for panel in board["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])
            }
            assert place["x"] + place["w"] <= 24
            assert not cells & taken, panel["title"]
            taken |= cells


# --- every query names a metric that exists ------------------------------------------------------------------------


def training_names() -> set[str]:
    """From a live scrape."""
    port = free_port()
    gauges = _Gauges(port)
    try:
        return series(scrape(port))
    finally:
        gauges.close()


def evaluation_names() -> set[str]:
    """From a live scrape; those on Ray's ports as the source names them (a `full` test scrapes them too)."""
    from lm.evaluation import counter
    from lm.evaluation.progress import Metrics

    port = free_port()
    metrics = Metrics(port)
    try:
        found = series(scrape(port))
    finally:
        metrics.close()
    for kind, name in re.findall(r'ray_metrics\.(Counter|Gauge)\("(pmi_eval_\w+)"', Path(str(counter.__file__)).read_text()):
        found |= on_ray({f"{name.removesuffix('_total')}_total" if kind == "Counter" else name})
    return found


def serving_names() -> set[str]:
    return on_ray(registered(PrometheusSink().registry))


def ray_names() -> set[str]:
    """Ray Serve's own, as its source names them."""
    spec = importlib.util.find_spec("ray")
    assert spec is not None
    assert spec.origin is not None
    source = "".join(path.read_text() for path in (Path(spec.origin).parent / "serve" / "_private").glob("*.py"))
    return on_ray(set(re.findall(r'"(serve_[a-z_]+)"', source)))


def wanted() -> dict[str, set[str]]:
    found = {where: used(query) for where, query in queries().items()}
    found |= {rule["alert"]: used(rule["expr"]) for rule in RULES}
    return found


def test_every_query_names_a_metric_that_exists() -> None:
    there = training_names() | evaluation_names() | serving_names() | ray_names() | {"up"}
    missing = {where: names - there for where, names in wanted().items()}
    missing = {where: {n for n in names if not n.startswith("redis_")} for where, names in missing.items()}
    assert {where: names for where, names in missing.items() if names} == {}
    assert all(wanted().values()), "a query without a metric"


def test_every_metric_of_the_service_is_on_a_dashboard() -> None:
    shown = {name for query in queries().values() for name in used(query)}
    for name, metric in METRICS.items():
        suffix = {"counter": "_total", "histogram": "_bucket", "gauge": ""}[metric.kind]
        assert f"ray_{name}{suffix}" in shown, name


def test_labels_in_queries_are_labels_of_their_metrics() -> None:
    for where, query in [*queries().items(), *((rule["alert"], rule["expr"]) for rule in RULES)]:
        for name, inside in re.findall(r"ray_(pmi_(?!eval)\w+?)(?:_total|_bucket)?\{([^}]*)\}", query):
            labels = set(re.findall(r"(\w+)\s*[=!]", inside))
            assert labels <= {*METRICS[name].labels, "le"}, where


@pytest.fixture
def redis_exporter(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A real Redis with our configuration, and a real exporter beside it."""
    port, web = free_port(), free_port()
    server = subprocess.Popen(
        ["redis-server", str(DEPLOY / "serve/redis.conf"), "--port", str(port), "--dir", str(tmp_path)], stdout=subprocess.DEVNULL
    )
    exporter = subprocess.Popen(
        ["prometheus-redis-exporter", "-redis.addr", f"redis://127.0.0.1:{port}", "-web.listen-address", f"127.0.0.1:{web}"],
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        yield port, web
    finally:
        for process in (exporter, server):
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.mark.needs("redis-server", "prometheus-redis-exporter")
def test_redis_with_our_configuration_is_durable_and_has_the_metrics_that_alerts_name(redis_exporter: tuple[int, int]) -> None:
    port, web = redis_exporter
    text, deadline = "", time.monotonic() + 20
    while "redis_up 1" not in text and time.monotonic() < deadline:
        time.sleep(0.2)
        try:
            text = scrape(web)
        except OSError:
            continue
    asked = {name for names in wanted().values() for name in names if name.startswith("redis_")}
    assert asked
    assert asked <= {line.split()[0].split("{")[0] for line in text.splitlines() if line and not line.startswith("#")}
    for line in ("redis_aof_enabled 1", "redis_aof_last_write_status 1"):
        assert line in text
    import redis

    with redis.Redis(port=port) as client:
        settings: Any = client.config_get("*")
    assert settings["appendfsync"] == "always"
    assert settings["maxmemory-policy"] == "noeviction"


LIVE = """
import sys, time
import ray
from lm.evaluation.counter import metrics as evaluation
from serving.metrics import METRICS, Metrics, RaySink
port = int(sys.argv[1])
ray.init(address="local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, _metrics_export_port=port)
metrics = Metrics(RaySink())
for name, metric in METRICS.items():
    metrics(name, 1.0, **{label: "x" for label in metric.labels})
for metric in evaluation().values():
    metric.set(1.0) if hasattr(metric, "set") else metric.inc(1.0)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.full
def test_metrics_come_out_of_a_live_ray_under_the_names_that_queries_use() -> None:
    port = free_port()
    environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", LIVE, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    )
    asked = {name for names in wanted().values() for name in names if name.startswith("ray_pmi_")}
    missing = asked
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", "Ray did not start"
        deadline = time.monotonic() + 60
        while missing and time.monotonic() < deadline:
            time.sleep(1)
            try:
                missing = asked - series(scrape(port))
            except OSError:
                continue
    finally:
        process.communicate(timeout=300)
    assert missing == set()
