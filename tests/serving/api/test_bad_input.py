"""Bad input of every kind is answered with a 4xx, quickly; keys and limits hold."""

import json
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest

from serving.auth import Keys
from serving.config import Limits
from tests.serving.api.conftest import Running, Serve

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
    from tests.serving.api.conftest import listening

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


def test_looking_at_an_old_stream_gives_no_tokens_back(serve: Serve, tmp_path: Path) -> None:
    keys = Keys(tmp_path / "keys.json")
    headers = {"Authorization": f"Bearer {keys.create('ada', Limits(tokens_per_minute=100))}"}
    running = serve(keys=str(tmp_path / "keys.json"))
    http, body = running.http(), {"prompt": "a", "max_tokens": 60, "temperature": 0, "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers=headers) as found:
        id = found.headers["X-Response-Id"]
        found.read()
    for _ in range(3):
        assert http.get(f"/v1/streams/{id}", headers=headers).status_code == 200
    assert http.post("/v1/completions", json={"prompt": "a", "max_tokens": 60}, headers=headers).status_code == 429


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
