"""Bad input of every kind is answered with a 4xx, quickly; keys and limits hold."""

import json
import socket
import time
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from serving.api.http import EventStream, Front
from serving.auth import Keys, Tenant
from serving.config import HttpSettings, Limits
from tests.serving.api.conftest import Running, Serve, listening

DEEP = b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"


@pytest.mark.parametrize(
    "body",
    [
        b"", b"{", b"[]", b"null", b'"text"', b'{"prompt": "\xff\xfe"}', b'{"prompt": "\\ud800"}', b'{"prompt": 5}', DEEP,
        b'{"prompt": "a", "max_tokens": 1e400}', b'{"prompt": "a", "temperature": NaN}', b'{"prompt": "a", "max_tokens": "5"}',
        b'{"prompt": [257]}', b'{"prompt": [-1]}', b'{"prompt": [true]}', b'{"prompt": "a", "max_tokens": 99999999}',
        b'{"prompt": "a", "stop": ""}', b'{"prompt": "a", "session_id": "../etc"}', b'{"prompt": "a", "seed": -1}',
        b'{"prompt": "a", "expected_version": 3}', b'{"prompt": ["a"], "n": 17}', b'{"prompt": "a", "sesion_id": "ada"}',
        b'{"prompt": "a", "logit_bias": {"50": 1}}', b'{"prompt": "a", "echo": true}', b'{"prompt": "a", "top_p": 0}',
    ],
)  # fmt: skip
def test_a_body_that_makes_no_sense_is_a_400(bad: Running, body: bytes) -> None:
    began = time.monotonic()
    answer = bad.http().post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) <= 2000
    assert time.monotonic() - began < 5


@pytest.fixture(scope="module")
def bad(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    """One service for all."""
    from contextlib import ExitStack

    from serving.api.app import make_app
    from serving.api.local import local_service
    from serving.config import ServeConfig

    store = f"sqlite:///{tmp_path_factory.mktemp('bad')}/s.db"
    values = {"models": [{"checkpoint": str(folder)}], "store": store, "http": {"body_bytes": 1 << 20, "body_seconds": 0.5}}
    with ExitStack() as stack:
        service = stack.enter_context(local_service(ServeConfig.model_validate(values | {"engine": {"threads": None}})))
        yield Running(stack.enter_context(listening(make_app(service))), service)


def test_other_ways_to_be_wrong(bad: Running) -> None:
    http = bad.http()
    for method, path, status in [
        ("GET", "/v1/nothing", 404), ("PUT", "/v1/completions", 405), ("GET", "/v1/sessions/none", 404),
        ("GET", "/v1/streams/none", 404), ("GET", "/v1/sessions/%00", 400), ("GET", "/v1/sessions?limit=0", 400),
        ("PUT", "/v1/sessions/x/memory", 400), ("GET", "/v1/models/none", 404), ("DELETE", "/v1/sessions/none", 404),
    ]:  # fmt: skip
        answer = http.request(method, path)
        assert (answer.status_code, answer.json()["error"]["message"] != "") == (status, True), (method, path, answer.text)
        assert answer.headers["X-Request-Id"]
    hostile = http.put("/v1/sessions/x/memory", content=b"\xff" * 5000)
    assert hostile.status_code == 400


def test_a_huge_body_is_a_413_whether_it_says_so_or_not(bad: Running) -> None:
    assert bad.http().post("/v1/completions", content=b"x" * (2 << 20)).status_code == 413

    def parts():
        for _ in range(64):
            yield b"x" * (1 << 16)

    try:
        status = bad.http().post("/v1/completions", content=parts()).status_code
    except httpx.TransportError:  # it hung up before the end
        status = 413
    assert status == 413


def test_a_slow_client_is_a_408(bad: Running) -> None:
    target = urlsplit(bad.url)
    with socket.create_connection((target.hostname, target.port)) as slow:
        slow.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        slow.settimeout(10)
        began = time.monotonic()
        assert slow.recv(4096).startswith(b"HTTP/1.1 408")
        assert time.monotonic() - began < 3


def test_a_key_opens_its_own_tenants_sessions_and_no_others(serve: Serve, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    ada, bob = keys.create("ada"), keys.create("bob")
    assert ada.rpartition("-")[2] not in (tmp_path / "keys.json").read_text(), "hashed at rest"
    running = serve(keys=str(tmp_path / "keys.json"))
    mine, theirs = ({"Authorization": f"Bearer {key}"} for key in (ada, bob))
    http = running.http()
    for headers in ({}, {"Authorization": "Bearer pmi-1-2"}, {"Authorization": f"Bearer {ada}x"}, {"Authorization": "Basic x"}):
        assert http.get("/v1/models", headers=headers).status_code == 401
    assert http.post("/v1/sessions", json={"id": "s"}, headers=mine).status_code == 201
    for method, path, body in [
        ("GET", "/v1/sessions/s", None), ("DELETE", "/v1/sessions/s", None), ("POST", "/v1/sessions/s/fork", {}),
        ("POST", "/v1/sessions/s/append", {"text": "x"}), ("GET", "/v1/sessions/s/memory", None),
        ("GET", "/v1/sessions/s/inspect", None),
        ("POST", "/v1/completions", {"prompt": "x", "session_id": "s"}), ("POST", "/v1/sessions/s/rollback", {}),
    ]:  # fmt: skip
        assert http.request(method, path, json=body, headers=theirs).status_code == 404, path
    asked = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3, "session_id": "s"}, headers=mine)
    assert asked.status_code == 200
    assert http.get(f"/v1/streams/{asked.json()['id']}", headers=theirs).status_code == 404
    assert http.get("/v1/sessions", headers=theirs).json()["data"] == []
    keys.remove(ada.split("-")[1])
    time.sleep(1.1)
    assert http.get("/v1/models", headers=mine).status_code == 401


def test_limits_of_a_tenant(serve: Serve, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    limits = Limits(requests_per_minute=6, sessions=1, max_tokens=20, prompt_tokens=10)
    headers = {"Authorization": f"Bearer {keys.create('ada', limits)}"}
    other = {"Authorization": f"Bearer {keys.create('bob')}"}
    http = serve(keys=str(tmp_path / "keys.json")).http()

    def ask(**body: object) -> httpx.Response:
        return http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, **body}, headers=headers)

    assert ask(max_tokens=21).status_code == 400
    assert ask(prompt="x" * 11).json()["error"]["code"] == "prompt_too_long"
    assert http.post("/v1/sessions", json={"id": "a"}, headers=headers).status_code == 201
    assert http.post("/v1/sessions", json={"id": "b"}, headers=headers).json()["error"]["code"] == "quota_exceeded"
    codes = [ask().status_code for _ in range(6)]
    assert codes.count(200) == 4
    refused = ask()
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert 1 <= int(refused.headers["Retry-After"]) <= 10
    assert http.post("/v1/completions", json={"prompt": "x", "max_tokens": 2}, headers=other).status_code == 200


def test_many_at_once_do_not_make_more_sessions_than_allowed(serve: Serve, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    headers = {"Authorization": f"Bearer {keys.create('ada', Limits(sessions=3))}"}
    http = serve(keys=str(tmp_path / "keys.json")).http(headers=headers)
    with ThreadPoolExecutor(16) as pool:
        codes = list(pool.map(lambda i: http.post("/v1/sessions", json={"id": f"s{i}"}).status_code, range(48)))
    kept = http.get("/v1/sessions").json()["data"]
    assert set(codes) <= {201, 403}
    assert codes.count(201) == len(kept) <= 3


def test_what_an_import_brings_counts_and_too_much_is_refused_before_it_is_read(serve: Serve, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    headers = {"Authorization": f"Bearer {keys.create('ada', Limits(stored_bytes=100_000))}"}
    running = serve(keys=str(tmp_path / "keys.json"))
    with connected(running) as slow:  # the body is never sent
        slow.sendall(b"PUT /v1/sessions/b/memory HTTP/1.1\r\nHost: x\r\nContent-Length: 130000\r\n")
        slow.sendall(f"Authorization: {headers['Authorization']}\r\n\r\n".encode())
        assert slow.recv(4096).startswith(b"HTTP/1.1 403")
    http = running.http(headers=headers)
    http.post("/v1/sessions", json={"id": "a"})
    http.post("/v1/completions", json={"prompt": "x" * 300, "max_tokens": 1, "session_id": "a"})
    file = http.get("/v1/sessions/a/memory").content
    codes = [http.put(f"/v1/sessions/b{i}/memory", content=file).status_code for i in range(20)]
    assert codes == sorted(codes)
    assert set(codes) == {200, 403}
    usage = running.service.store.usage("ada")
    assert usage.bytes + usage.response_bytes <= 100_000
    again = http.put("/v1/sessions/b0/memory?expected_version=1", content=file)
    assert again.status_code == 200, "in place of what it had"


def test_whatever_is_recorded_needs_room(serve: Serve, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    headers = {"Authorization": f"Bearer {keys.create('ada', Limits(stored_bytes=4000))}"}
    http = serve(keys=str(tmp_path / "keys.json")).http(headers=headers)
    ask = {"prompt": "x", "max_tokens": 2}
    assert http.post("/v1/sessions", json={"id": "a"}).status_code == 201
    assert http.post("/v1/completions", json=ask).status_code == 200, "nothing is kept of it"
    for body, more in ((ask | {"stream": True}, {}), (ask, {"Idempotency-Key": "k"}), (ask | {"session_id": "a"}, {})):
        answer = http.post("/v1/completions", json=body, headers=more)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "quota_exceeded")


def test_large_imports_are_taken_a_few_at_a_time(serve: Serve) -> None:
    running = serve(http={"body_bytes": 100_000, "imports": 1})

    def send(size: int) -> httpx.Response:
        return running.http().put("/v1/sessions/y/memory", content=b"x" * size)

    with connected(running) as slow:
        slow.sendall(b"PUT /v1/sessions/x/memory HTTP/1.1\r\nHost: x\r\nContent-Length: 200000\r\n\r\n")
        time.sleep(0.2)
        refused = send(200_000)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_overloaded")
        assert int(refused.headers["Retry-After"]) >= 1
        assert send(50_000).status_code == 400, "a small one is no matter"
        slow.sendall(b"x" * 200_000)
        assert slow.recv(4096).startswith(b"HTTP/1.1 400")
    assert send(200_000).status_code == 400, "there is room again"


@contextmanager
def connected(running: Running) -> Iterator[socket.socket]:
    target = urlsplit(running.url)
    with socket.create_connection((target.hostname, target.port)) as made:
        made.settimeout(10)
        yield made


def test_without_keys_other_machines_are_refused(bad: Running) -> None:
    """uvicorn believes a proxy on this machine about who asks, as it does in front of Ray."""
    for address, status in (("203.0.113.9", 403), ("10.0.0.1", 403), ("fe80::1", 403), ("127.0.0.1", 200), ("::1", 200)):
        answer = bad.http().get("/v1/models", headers={"X-Forwarded-For": address})
        assert answer.status_code == status, address
        assert status == 200 or "pmi keys create" in answer.json()["error"]["message"]
    assert bad.http().get("/health", headers={"X-Forwarded-For": "203.0.113.9"}).status_code == 200


def test_with_keys_other_machines_may_ask(serve: Serve, tmp_path: Path) -> None:
    key = Keys(tmp_path / "keys.json").create("ada")
    headers = {"Authorization": f"Bearer {key}", "X-Forwarded-For": "203.0.113.9"}
    assert serve(keys=str(tmp_path / "keys.json")).http().get("/v1/models", headers=headers).status_code == 200


def test_a_client_that_does_not_read_is_taken_to_have_left() -> None:
    """A real socket whose buffers are full: what makes the answer is closed, and it counts as a disconnect."""
    closed: list[float] = []
    gone: list[float] = []

    async def events() -> AsyncGenerator[bytes]:
        try:
            while True:
                yield b"data: " + b"x" * 100_000 + b"\n\n"
        finally:
            closed.append(time.monotonic())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await EventStream(events(), {}, lambda: gone.append(time.monotonic()))(scope, receive, send)

    async def nothing(request: Any, size: int) -> None:
        pass

    front = Front(app, lambda _: Tenant("local"), lambda *_, **__: None, HttpSettings(send_seconds=0.5), True, nothing)
    with listening(front) as url, socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.connect((urlsplit(url).hostname, urlsplit(url).port))
        began = time.monotonic()
        lazy.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
        while not closed and time.monotonic() - began < 10:
            time.sleep(0.02)
        assert closed, "the stream is still held"
        assert 0.4 < closed[0] - began < 5
        assert len(gone) == 1


def test_joining_a_response_gives_no_tokens_back(serve: Serve, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    headers = {"Authorization": f"Bearer {keys.create('ada', Limits(tokens_per_minute=100))}"}
    free = {"Authorization": f"Bearer {keys.create('grace', Limits())}"}
    http = serve(keys=str(tmp_path / "keys.json")).http()
    body: dict[str, object] = {"prompt": "a", "max_tokens": 60, "temperature": 0}
    said = http.post("/v1/completions", json=body, headers=free).json()["choices"][0]["text"]
    stopped = http.post("/v1/completions", json={**body, "stop": [said[6:10]]}, headers=headers | {"Idempotency-Key": "k"})
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 70}, headers=headers).status_code == 200
    for _ in range(3):
        assert http.get(f"/v1/streams/{stopped.json()['id']}", headers=headers).status_code == 200
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 60}, headers=headers).status_code == 429


def test_tokens_that_were_not_used_are_given_back(serve: Serve, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    headers = {"Authorization": f"Bearer {keys.create('ada', Limits(tokens_per_minute=100))}"}
    free = {"Authorization": f"Bearer {keys.create('grace', Limits())}"}
    http = serve(keys=str(tmp_path / "keys.json")).http()
    body: dict[str, object] = {"prompt": "a", "max_tokens": 60, "temperature": 0}
    said = http.post("/v1/completions", json=body, headers=free).json()["choices"][0]["text"]
    for _ in range(3):  # each could use 61 of 100, and uses few: the stop string is found early
        found = http.post("/v1/completions", json={**body, "stop": [said[6:10]]}, headers=headers)
        assert found.status_code == 200, found.text
        assert found.json()["usage"]["completion_tokens"] < 20
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 99}, headers=headers).status_code == 429


def test_leaving_and_coming_back_is_charged_once(serve: Serve, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    headers = {"Authorization": f"Bearer {keys.create('ada', Limits(tokens_per_minute=1000))}"}
    http, body = (
        serve(keys=str(tmp_path / "keys.json")).http(),
        {"prompt": "a", "max_tokens": 900, "temperature": 0, "stream": True},
    )
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as found:
        id = found.headers["X-Response-Id"]
        next(found.iter_lines())
    time.sleep(0.5)
    assert http.get(f"/v1/streams/{id}", headers=headers).text.endswith("data: [DONE]\n\n")
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 200}, headers=headers).status_code == 429


def test_logs_name_requests_and_sessions_but_hold_no_text(bad: Running, caplog: pytest.LogCaptureFixture) -> None:
    import logging

    from serving.api.http import JsonLines, log

    caplog.set_level(logging.INFO, logger="pmi.api")
    log.addHandler(caplog.handler)
    bad.http().post("/v1/sessions", json={"id": "logged"})
    answer = bad.http().post("/v1/completions", json={"prompt": "a secret of mine", "max_tokens": 3, "session_id": "logged"})
    time.sleep(0.1)
    log.removeHandler(caplog.handler)
    lines = [json.loads(JsonLines().format(record)) for record in caplog.records]
    mine = [line for line in lines if line.get("request") == answer.headers["X-Request-Id"]]
    assert mine[0]["session"] == "logged"
    assert mine[0]["tokens_out"] == 3
    assert "secret" not in json.dumps(lines)
