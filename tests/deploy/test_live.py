"""deploy/observe against a service that runs: scrape configuration, rules and dashboards in a real Prometheus."""

import contextlib
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from lm.machine import free_port
from lm.model.pretrained import save_pretrained
from serving.auth import Keys
from tests.serving.api.cluster import Cluster
from tests.serving.engine.conftest import checkpoint

from .metrics import scrape, used
from .schemas import DEPLOY
from .test_observe import OBSERVE, queries

TROUBLE = {
    "ray_pmi_limited_total", "ray_pmi_conflicts_total", "ray_pmi_disconnects_total", "ray_pmi_engine_failures_total",
    "ray_pmi_failovers_total", "ray_pmi_evicted_sessions_total", "ray_pmi_evicted_responses_total",
}  # fmt: skip
"""Counters that begin with the first trouble: an ordinary day has none of them."""


class Observed:
    """`pmi serve` as deploy/serve/serve.yaml has it, with sessions in Redis; its exporter; Prometheus with our configuration."""

    def __init__(self, folder: Path) -> None:
        self.redis, self.exporter, self.port = free_port(), free_port(), free_port()
        self._processes: list[subprocess.Popen[bytes]] = []
        self._start(
            "redis-server",
            str(DEPLOY / "serve/redis.conf"),
            "--port",
            str(self.redis),
            "--dir",
            str(folder),
            "--maxmemory",
            "1gb",
        )
        self._start(
            "prometheus-redis-exporter", "-redis.addr", f"redis://127.0.0.1:{self.redis}",
            "-web.listen-address", f"127.0.0.1:{self.exporter}",
        )  # fmt: skip
        found = checkpoint()
        save_pretrained(found.model, found.tokenizer, folder / "tiny")
        self.service = Cluster(folder, folder / "tiny", free_port(), "--store", f"redis://127.0.0.1:{self.redis}/0")
        self.key = Keys(folder / "keys.json").create("ada")
        as_deployed = yaml.safe_load((DEPLOY / "serve/serve.yaml").read_text())
        here = {"models": [{"checkpoint": str(folder / "tiny")}], "keys": str(folder / "keys.json")}
        (folder / "serve.yaml").write_text(yaml.safe_dump(as_deployed | here))
        self.service.start()
        configuration = (OBSERVE / "prometheus.yml").read_text()
        ports = {"pmi:8080": self.service.metrics_port, "redis-exporter:9121": self.exporter, "127.0.0.1:9090": self.port}
        for target, port in ports.items():
            assert target in configuration
            configuration = configuration.replace(target, f"127.0.0.1:{port}")
        (folder / "prometheus.yml").write_text(configuration.replace("_interval: 15s", "_interval: 1s"))
        shutil.copy(OBSERVE / "rules.yml", folder)
        self._start(
            "prometheus", f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address=127.0.0.1:{self.port}",
        )  # fmt: skip

    def _start(self, *command: str) -> None:
        self._processes.append(subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL))

    def work(self) -> None:
        """What a service does on an ordinary day: turns of sessions, some streamed, one retried, and a client's mistake."""
        assert self.service.http().get("/v1/models").status_code == 401
        with self.service.http(headers={"Authorization": f"Bearer {self.key}"}) as http:
            sessions = [http.post("/v1/sessions", json={}).raise_for_status().json()["id"] for _ in range(3)]
            for turn in range(3):
                for number, session in enumerate(sessions):
                    body = {"prompt": "The whale " * 4, "max_tokens": 40, "session_id": session, "stream": number == 0}
                    key = {"Idempotency-Key": f"{session}-{turn}"}
                    for _ in range(2 if number == 1 else 1):
                        http.post("/v1/completions", json=body, headers=key).raise_for_status()
            assert http.post("/v1/completions", json={"prompt": "x", "session_id": "nobody"}).status_code == 404

    def api(self, path: str, **parameters: str) -> Any:
        answer = httpx.get(f"http://127.0.0.1:{self.port}/api/v1/{path}", params=parameters)
        assert answer.status_code == 200, answer.text
        return answer.json()["data"]

    def close(self) -> None:
        if hasattr(self, "service"):
            self.service.kill()
        for process in self._processes:
            process.send_signal(signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Observed]:
    made = Observed.__new__(Observed)
    try:
        made.__init__(tmp_path_factory.mktemp("observed"))  # type: ignore[misc]
        yield made
    finally:
        made.close()


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.needs("redis-server", "prometheus-redis-exporter", "prometheus")
def test_every_query_of_the_serving_dashboard_shows_something_of_a_service_at_work(observed: Observed) -> None:
    asked = {where: re.sub(r"\$model", ".+", query) for where, query in queries().items() if where.startswith("serving")}
    assert len(asked) > 40
    empty, deadline = set(asked), time.monotonic() + 120
    while empty and time.monotonic() < deadline:
        observed.work()
        with contextlib.suppress(httpx.ConnectError):
            empty = {where for where in empty if not observed.api("query", query=asked[where])["result"]}
            empty = {where for where in empty if not used(asked[where]) & TROUBLE}
    assert {where: asked[where] for where in empty} == {}


@pytest.mark.full
@pytest.mark.needs("redis-server", "prometheus-redis-exporter", "prometheus")
def test_every_metric_of_the_service_that_a_query_or_an_alert_names_is_in_its_scrape(observed: Observed) -> None:
    observed.work()
    time.sleep(12)  # Ray's agents report every 10 s
    rules = yaml.safe_load((OBSERVE / "rules.yml").read_text())["groups"]
    named = {name for query in queries().values() for name in used(query)}
    named |= {name for group in rules for rule in group["rules"] for name in used(rule["expr"])}
    named = {name for name in named if name.startswith(("ray_", "redis_")) and not name.startswith("ray_pmi_eval_")}
    lines = (scrape(observed.service.metrics_port) + scrape(observed.exporter)).splitlines()
    there = {re.split(r"[{ ]", line)[0] for line in lines if line and not line.startswith("#")}
    assert len(named) > 30
    assert named - there - TROUBLE == set()


@pytest.mark.full
@pytest.mark.needs("redis-server", "prometheus-redis-exporter", "prometheus")
def test_prometheus_evaluates_every_rule_and_an_ordinary_day_raises_no_alert(observed: Observed) -> None:
    observed.work()
    deadline = time.monotonic() + 60
    while True:
        rules = [rule for group in observed.api("rules")["groups"] for rule in group["rules"]]
        if all(rule["health"] != "unknown" for rule in rules) or time.monotonic() > deadline:
            break
        time.sleep(1)
    assert len(rules) > 20
    assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
    assert {rule["name"]: rule["state"] for rule in rules if rule["state"] == "firing"} == {}
    up = {one["metric"]["job"]: one["value"][1] for one in observed.api("query", query="up")["result"]}
    assert up == {"pmi-serve": "1", "pmi-redis": "1", "prometheus": "1"}
