"""On a real Ray cluster with 2 engine replicas: what happens when things die, stop, race, leave and pile up."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from lm.machine import free_port
from serving.sessions.opening import open_store
from serving.sessions.store import Content, Settings
from tests.serving.api.cluster import Cluster, check_drain, read_events
from tests.serving.api.conftest import GREEDY
from tests.serving.engine.conftest import SEGMENT, checkpoint, greedy

pytestmark = pytest.mark.timeout(900)
ASK = {"model": "tiny", "prompt": "The whale", **GREEDY}


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp("cluster"), folder, free_port())
    try:
        made.seconds = made.start()
        yield made
    finally:
        made.kill()


def expected(prompt: str, tokens: int) -> str:
    return checkpoint().tokenizer.decode(greedy(checkpoint(), list(prompt.encode()), tokens)[0])


def make(cluster: Cluster, id: str) -> None:
    cluster.http().post("/v1/sessions", json={"id": id}).raise_for_status()


def stream(cluster: Cluster, id: str, tokens: int, begun: threading.Barrier | None = None, **more: object) -> tuple[str, int]:
    """A streamed turn of a session, resumed as often as need be; the text and how often. `begun`: met at its first tokens."""
    text, last, resumed, done = "", "", 0, False
    while not done:
        try:
            with cluster.http() as http:
                if not last:
                    body = ASK | {"max_tokens": tokens, "session_id": id, "stream": True} | more
                    call = http.stream("POST", "/v1/completions", json=body)
                else:
                    resumed += 1
                    call = http.stream("GET", f"/v1/streams/{last.rpartition(':')[0]}", headers={"Last-Event-ID": last})
                with call as response:
                    assert response.status_code == 200, response.read()
                    for event, data in read_events(response):
                        if "error" in data:
                            break
                        if data["choices"]:
                            text, last = text + data["choices"][0]["text"], event
                            done = done or data["choices"][0]["finish_reason"] is not None
                        if begun is not None:
                            begun.wait(60)
                            begun = None
        except httpx.HTTPError:
            time.sleep(0.1)
        assert resumed < 50
    return text, resumed


def test_it_tells_how_to_reach_it_and_the_stock_client_does(cluster: Cluster) -> None:
    # 22 to 31 s where nothing else runs (benchmarks.serving prints it); here other tests' leftovers do
    assert cluster.seconds < 120
    assert "this machine only" in cluster.output
    assert "curl" in cluster.output
    client = openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.completions.create(**ASK, max_tokens=12).choices[0].text == expected("The whale", 12)
    make(cluster, "stock")
    parts = list(client.completions.create(**ASK, max_tokens=30, stream=True, extra_body={"session_id": "stock"}))
    assert "".join(part.choices[0].text for part in parts) == expected("The whale", 30)
    assert parts[-1].session["position"] == 40


def test_all_give_way_to_the_engines_loops(cluster: Cluster) -> None:
    def policies(deployment: str) -> list[set[int]]:
        return [{os.sched_getscheduler(thread.id) for thread in p.threads()} for p in cluster.replicas(deployment)]

    assert policies("ingress") == [{os.SCHED_BATCH}]
    assert policies("engine") == [{os.SCHED_BATCH, os.SCHED_OTHER}] * 2


def test_rays_ports_ask_for_the_token(cluster: Cluster) -> None:
    address = next(
        part.partition("=")[2] for p in cluster.processes() for part in p.cmdline() if part.startswith("--gcs-address=")
    )

    def status(**given: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
        return subprocess.run(command, env=os.environ | given, capture_output=True, text=True, check=False, timeout=120)

    token = cluster.folder / "data" / "pmi" / "ray-token"
    assert status(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(token)).returncode == 0
    stranger = status(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="0" * 64)
    assert stranger.returncode != 0
    assert "token" in (stranger.stdout + stranger.stderr).lower()


def test_large_files_pass_between_proxy_ingress_and_engine(cluster: Cluster) -> None:
    """More than the 4 MiB that a message of gRPC may have by itself, out and in; and as garbage, which is refused as such."""
    found, history = checkpoint(), (256, *(i % 256 for i in range(700_000)))
    settings = Settings(found.fingerprint, found.tokenizer.fingerprint(), SEGMENT, keep_history=True)
    with contextlib.closing(open_store(f"sqlite:///{cluster.folder}/sessions.db")) as store:
        store.restore("local", "large", Content(settings, 0, None, (), history, history))
    http = cluster.http()
    answer = http.get("/v1/sessions/large/memory")
    assert len(answer.content) == int(answer.headers["Content-Length"]) > 5 << 20
    assert (answer.headers["X-Session-Version"], answer.headers["X-Session-Position"]) == ("1", str(len(history)))
    made = http.put("/v1/sessions/copy/memory", content=answer.content)
    assert (made.status_code, made.json()["position"]) == (200, len(history)), made.text
    garbage = http.put("/v1/sessions/garbage/memory", content=b"\xff" * (6 << 20))
    assert (garbage.status_code, garbage.json()["error"]["type"]) == (400, "invalid_request_error"), garbage.text
    long = http.post("/v1/completions", json=ASK | {"prompt": [300] * 1_000_000})
    assert long.json()["error"]["code"] == "invalid_value"


def test_without_keys_rays_proxy_says_who_asks_and_other_machines_are_refused(cluster: Cluster) -> None:
    refused = cluster.http().get("/v1/models", headers={"X-Forwarded-For": "203.0.113.9"})
    assert (refused.status_code, refused.json()["error"]["code"]) == (403, "no_keys")
    assert cluster.http().get("/v1/models").status_code == 200


def test_1_kill_9_of_a_replica_in_the_middle_of_streams(cluster: Cluster) -> None:
    """All texts are whole, whoever's engine was killed; a replacement serves again within 30 s."""
    tokens, names = 2000, [f"kill-{i}" for i in range(6)]
    for name in names:
        make(cluster, name)
    assert len(cluster.engines()) == 2
    begun = threading.Barrier(7)
    with contextlib.closing(open_store(f"sqlite:///{cluster.folder}/sessions.db")) as store, ThreadPoolExecutor(6) as pool:
        running = [pool.submit(stream, cluster, name, tokens, begun) for name in names]
        begun.wait(60)
        sessions = [store.get("local", name) for name in names]
        held = next(session for session in sessions if session.owner)  # how fast the machine is does not matter
        assert held.position < 10 + tokens
        [owner] = [process for process in cluster.engines() if f"-{process.pid}-" in str(held.owner)]
        owner.kill()
        killed = time.monotonic()
        texts = [run.result()[0] for run in running]
    assert texts == [expected("The whale", tokens)] * 6
    for name in names:
        assert cluster.http().get(f"/v1/sessions/{name}").json()["position"] == 10 + tokens
    while len(cluster.engines()) < 2:
        assert time.monotonic() - killed < 30
        time.sleep(0.1)
    assert cluster.http().post("/v1/completions", json=ASK | {"max_tokens": 5}).status_code == 200


def test_3_two_clients_on_one_session(cluster: Cluster) -> None:
    make(cluster, "race")
    start = threading.Barrier(4)

    def ask(_: int) -> httpx.Response:
        with cluster.http() as http:
            start.wait()
            return http.post("/v1/completions", json=ASK | {"max_tokens": 300, "session_id": "race"})

    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(ask, range(4)))
    codes = [result.status_code for result in results]
    assert set(codes) == {200, 409}
    for result in results:
        if result.status_code == 409:
            assert result.json()["error"]["type"] == "conflict_error"
    assert cluster.http().get("/v1/sessions/race").json()["position"] == 1 + 309 * codes.count(200)


def test_5_a_client_that_leaves_frees_the_lane_and_the_journal_holds_what_was_generated(cluster: Cluster) -> None:
    make(cluster, "leaving")
    with cluster.http() as http:
        body = ASK | {"max_tokens": 9000, "session_id": "leaving", "stream": True}
        with http.stream("POST", "/v1/completions", json=body) as response:
            last = next(read_events(response))[0]
        left = time.monotonic()
        while http.get("/v1/sessions/leaving").json()["busy"]:
            assert time.monotonic() - left < 5
            time.sleep(0.01)
        seconds = time.monotonic() - left
        assert seconds < 0.2
        position = http.get("/v1/sessions/leaving").json()["position"]
        time.sleep(0.5)
        assert http.get("/v1/sessions/leaving").json()["position"] == position, "it has stopped"
        count = position - 10
        assert int(last.rpartition(":")[2]) <= count < 9000
        # what the journal holds is what the model says: go on, and compare everything
        id = last.rpartition(":")[0]
        with http.stream("GET", f"/v1/streams/{id}") as response:
            text = ""
            for _, data in read_events(response):
                text += data["choices"][0]["text"]
                if len(text) > count + 50:
                    break
    whole = expected("The whale", count + 400)
    assert whole.startswith(text[:-8])
    print(f"lane freed after {seconds:.3f} s")


def test_6_overload_is_refused_in_bounds_and_passes(cluster: Cluster) -> None:
    """Four times what lanes and queues hold: some are refused as API errors, the others are answered in bounded time."""

    # one client for all: making 256 of them takes so long that they would come one by one
    http = cluster.http(limits=httpx.Limits(max_connections=None, max_keepalive_connections=0))

    def ask(_: int) -> tuple[int, float, dict]:
        start = time.monotonic()
        answer = http.post("/v1/completions", json=ASK | {"max_tokens": 120})
        return answer.status_code, time.monotonic() - start, answer.json()

    with http, ThreadPoolExecutor(256) as pool:
        full = max(seconds for _, seconds, _ in pool.map(ask, range(64)))
        results = list(pool.map(ask, range(256)))
    codes = [code for code, _, _ in results]
    assert set(codes) <= {200, 429, 503}
    assert codes.count(200) >= 32
    assert codes.count(429) + codes.count(503) > 0
    for code, _, body in results:
        if code != 200:
            assert body["error"]["code"] in ("overloaded", "service_overloaded")
    # the refusals share the cores with the work: four times the clients may cost all of it four times the time, no more
    assert max(seconds for code, seconds, _ in results if code == 200) < 4 * full + 5
    with cluster.http() as http:
        for _ in range(5):
            assert ask(0)[0] == 200


def test_metrics_of_all_replicas_are_there(cluster: Cluster) -> None:
    deadline = time.monotonic() + 30
    wanted = {
        "ray_pmi_first_token_seconds_count", "ray_pmi_tokens_out_total", "ray_pmi_resumes_total", "ray_pmi_journal_seconds_total",
        "ray_pmi_snapshots_total", "ray_pmi_active", "ray_pmi_batch_occupancy", "ray_pmi_stored_sessions",
    }  # fmt: skip
    while (missing := wanted - cluster.metrics().keys()) and time.monotonic() < deadline:
        time.sleep(1)
    assert missing == set()


@pytest.mark.needs("prometheus")
def test_a_real_prometheus_scrapes_it(cluster: Cluster, tmp_path: Path) -> None:
    port = free_port()
    target = f"127.0.0.1:{cluster.metrics_port}"
    config = {"scrape_configs": [{"job_name": "pmi", "scrape_interval": "1s", "static_configs": [{"targets": [target]}]}]}
    (tmp_path / "prometheus.yml").write_text(json.dumps(config))
    command = [
        "prometheus", f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            cluster.http().post("/v1/completions", json=ASK | {"max_tokens": 7}).raise_for_status()
            deadline, result = time.monotonic() + 60, []
            while not result and time.monotonic() < deadline:
                time.sleep(0.5)
                with contextlib.suppress(httpx.HTTPError):
                    query = {"query": "sum(ray_pmi_tokens_out_total{tenant='local', model='tiny'})"}
                    answer = httpx.get(f"http://127.0.0.1:{port}/api/v1/query", params=query).json()
                    result = answer["data"]["result"]
            assert float(result[0]["value"][1]) >= 7
        finally:
            process.terminate()


def test_2_full_stop_and_start_between_two_turns(cluster: Cluster) -> None:
    """Everything is killed; the session goes on, and no more than its tail is read again."""
    make(cluster, "lasting")
    prompt = "x" * 300
    body = ASK | {"prompt": prompt, "max_tokens": 20, "session_id": "lasting"}
    first = cluster.http().post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"]
    cluster.kill()
    cluster.start()
    again = cluster.http().post("/v1/completions", json=body | {"prompt": " and"}).raise_for_status().json()
    ids = list(prompt.encode()) + greedy(checkpoint(), list(prompt.encode()), 20)[0]
    assert checkpoint().tokenizer.decode(ids[-20:]) == first
    assert again["choices"][0]["text"] == checkpoint().tokenizer.decode(greedy(checkpoint(), [*ids, *b" and"], 20)[0])
    assert again["usage"]["replayed_tokens"] <= 8
    deadline = time.monotonic() + 20
    while "ray_pmi_replayed_tokens_total" not in (found := cluster.metrics()) and time.monotonic() < deadline:
        time.sleep(0.5)
    assert found["ray_pmi_replayed_tokens_total"] <= 8
    assert found["ray_pmi_engine_read_total"] <= 8 + 4, "the counter shows: its history was not read again"


@pytest.mark.full
def test_4_rolling_update_under_load_to_other_code_and_other_weights(cluster: Cluster, folder: Path, other_folder: Path) -> None:
    """No request fails, long streams come to the same end; then the old model is retired, and its sessions are told."""
    make(cluster, "rolling")
    cluster.http().post("/v1/sessions", json={"id": "moving", "keep_history": True}).raise_for_status()
    stream(cluster, "moving", 20)
    over, failures, counts = threading.Event(), [], [0, 0]

    def load(number: int) -> None:
        """Short requests, every other one in a session of its own."""
        name = f"load-{number}"
        make(cluster, name)
        while not over.is_set():
            body = ASK | {"max_tokens": 10} | ({"session_id": name} if number % 2 else {})
            answer = cluster.http().post("/v1/completions", json=body)
            counts[answer.status_code != 200] += 1
            if answer.status_code != 200:
                failures.append(answer.text)

    before = {process.pid for process in cluster.engines()}
    with ThreadPoolExecutor(8) as pool:
        loads = [pool.submit(load, number) for number in range(4)]
        long = pool.submit(stream, cluster, "rolling", 3000)
        time.sleep(1)
        cluster.configure([{"checkpoint": str(folder)}], revision="2")
        cluster.line("updated")
        while before & {process.pid for process in cluster.engines()}:
            time.sleep(0.2)
        models = [
            {"checkpoint": str(other_folder), "name": "tiny"},
            {"checkpoint": str(folder), "name": "old", "use": "sessions"},
        ]
        cluster.configure(models, revision="2")
        cluster.line("updated")
        wanted = checkpoint(seed=1).fingerprint
        while cluster.http().get("/v1/models").json()["data"][0]["fingerprint"] != wanted:
            time.sleep(0.2)
        time.sleep(2)
        over.set()
        for each in loads:
            each.result()
        text, _ = long.result()
    assert failures == []
    assert counts[0] > 20
    assert text == expected("The whale", 3000)
    cluster.configure(models[:1], revision="2")
    told = cluster.line("model ")
    assert checkpoint().fingerprint in told
    assert "local/" in told
    error = cluster.http().post("/v1/completions", json=ASK | {"session_id": "moving"}).json()["error"]
    assert error["code"] == "session_model_retired"
    assert [choice["action"] for choice in error["choices"]] == ["migrate", "export", "delete"]
    cluster.http().post("/v1/sessions/moving/migrate", json={"model": "tiny"}).raise_for_status()
    assert cluster.http().post("/v1/completions", json=ASK | {"session_id": "moving", "max_tokens": 5}).status_code == 200


def test_a_stop_lets_streams_finish(cluster: Cluster) -> None:
    """What `pmi serve` does when it is told to stop; it must be the last test of its cluster."""
    make(cluster, "draining")
    check_drain(cluster, "draining")
