"""Turns are applied once, whoever asks again; streams go on behind the last event that was received."""

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from urllib.parse import urlsplit

import httpx
import openai
import pytest

from serving.api.turns import Attempt
from tests.serving.api.conftest import GREEDY, Running, Serve, read_events
from tests.serving.engine.conftest import checkpoint, greedy
from tests.serving.sessions.conftest import LocalRedis, redis_server  # noqa: F401

ASK = {"model": "tiny", "prompt": "The whale", "max_tokens": 60, **GREEDY}


def expected(prompt: str = "The whale", tokens: int = 60) -> str:
    return checkpoint().tokenizer.decode(greedy(checkpoint(), list(prompt.encode()), tokens)[0])


def make(running: Running, id: str = "ada", **more: object) -> dict:
    return running.http().post("/v1/sessions", json={"id": id, **more}).raise_for_status().json()


def session(running: Running, id: str = "ada") -> dict:
    return running.http().get(f"/v1/sessions/{id}").json()


@pytest.mark.parametrize("with_session", [True, False])
def test_a_dropped_stream_goes_on_where_it_stopped(running: Running, with_session: bool) -> None:
    make(running)
    body = ASK | {"stream": True, "max_tokens": 200} | ({"session_id": "ada"} if with_session else {})
    whole = expected(tokens=200)
    text, last = "", ""
    with running.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        for id, data in read_events(response):
            text, last = text + data["choices"][0]["text"], id
            if int(id.rpartition(":")[2]) > 3:
                break
    while text != whole:
        id = last.rpartition(":")[0]
        with running.http() as http, http.stream("GET", f"/v1/streams/{id}", headers={"Last-Event-ID": last}) as response:
            assert response.status_code == 200, response.read()
            for n, (id, data) in enumerate(read_events(response)):
                if data["choices"]:
                    text, last = text + data["choices"][0]["text"], id
                if n == 12:
                    break
        assert whole.startswith(text)
    if with_session:
        time.sleep(0.2)
        assert session(running)["position"] == 1 + 9 + 200


def test_a_disconnect_frees_the_lane_and_the_journal_holds_what_was_generated(running: Running) -> None:
    make(running)
    engine = running.service.turns.models[checkpoint().fingerprint].client.engine
    with running.http() as http, http.stream(
        "POST", "/v1/completions", json=ASK | {"stream": True, "max_tokens": 5000, "session_id": "ada"}
    ) as response:  # fmt: skip
        id, _ = next(read_events(response))
    left = time.monotonic()
    while engine.load != (0, 0) and time.monotonic() - left < 2:
        time.sleep(0.005)
    assert time.monotonic() - left < 0.2
    time.sleep(0.1)
    found = running.service.store.response("local", id.rpartition(":")[0])
    assert found.status == "interrupted"
    assert session(running)["position"] == 10 + len(found.ids)
    assert list(found.ids) == greedy(checkpoint(), list(b"The whale"), len(found.ids))[0]
    assert not session(running)["busy"]


def test_a_stream_that_outlasts_its_replica_is_told_how_to_go_on(serve: Serve) -> None:
    running = serve(scaling={"drain": 2.5, "health_period": 0.1})
    make(running)
    body = ASK | {"stream": True, "max_tokens": 9000, "session_id": "ada"}
    text, last = "", ""
    with running.http() as http, http.stream("POST", "/v1/completions", json=body) as response:
        for id, data in read_events(response):
            if "error" in data:
                break
            text, last = text + data["choices"][0]["text"], id
            running.service.asked = running.service.asked or time.perf_counter()  # and then never again
    assert data["error"]["code"] == "interrupted"
    name, _, count = last.rpartition(":")
    assert data["error"]["resume"] == f"/v1/streams/{name}"
    with running.http() as http, http.stream("GET", f"/v1/streams/{name}", headers={"Last-Event-ID": last}) as response:
        for id, data in read_events(response):  # it began since, so it is left in peace
            text, last = text + data["choices"][0]["text"], id
            if int(last.rpartition(":")[2]) > int(count) + 300:
                break
    whole = expected(tokens=int(last.rpartition(":")[2]))
    assert whole.startswith(text[:-8])
    assert len(text) > 300


def test_a_new_turn_closes_an_interrupted_response(running: Running) -> None:
    make(running)
    with running.http() as http, http.stream(
        "POST", "/v1/completions", json=ASK | {"stream": True, "max_tokens": 5000, "session_id": "ada"}
    ) as response:  # fmt: skip
        id = next(read_events(response))[0].rpartition(":")[0]
    time.sleep(0.3)
    running.client().completions.create(**ASK, extra_body={"session_id": "ada"})
    with running.http() as http, http.stream("GET", f"/v1/streams/{id}") as response:
        got = list(read_events(response))
    assert got[-1][1]["error"]["code"] == "response_closed"


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_with_the_same_key_is_applied_once(running: Running, stream: bool) -> None:
    make(running)
    client = running.client()
    texts, marks = [], []
    for _ in range(3):
        found = client.completions.create(
            **ASK, stream=stream, extra_headers={"Idempotency-Key": "k1"}, extra_body={"session_id": "ada", "expected_version": 1}
        )
        parts = list(found) if stream else [found]
        texts.append("".join(part.choices[0].text for part in parts))
        marks.append(parts[-1].session)
    assert texts == [expected()] * 3
    assert marks == [marks[0]] * 3
    assert session(running)["position"] == 70
    with pytest.raises(openai.ConflictError) as error:
        client.completions.create(
            **(ASK | {"prompt": "other"}), extra_headers={"Idempotency-Key": "k1"}, extra_body={"session_id": "ada"}
        )
    assert error.value.code == "idempotency_key_reused"
    assert session(running)["position"] == 70


@pytest.mark.parametrize("lost", ["in the middle", "at the end"])
def test_the_stock_clients_own_retries_do_not_apply_a_turn_twice(running: Running, lost: str) -> None:
    """The connection is lost before an answer arrives; what the client sends again by itself is joined to the first."""
    make(running)
    tokens = 300

    def ready() -> bool:
        return session(running)["position"] >= (10 + tokens if lost == "at the end" else 20)

    with dropping(running.url, ready) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=2)
        found = client.completions.create(**(ASK | {"max_tokens": tokens}), extra_body={"session_id": "ada"})
    assert found.choices[0].text == expected(tokens=tokens)
    assert session(running)["position"] == 10 + tokens
    assert "pmi_joined_total 1.0" in running.http().get("/metrics").text
    client = running.client()
    client.completions.create(**(ASK | {"max_tokens": 5}), extra_body={"session_id": "ada"})
    assert session(running)["position"] == 10 + tokens + 9 + 5, "the next one is a new turn"


@contextmanager
def dropping(url: str, ready: Callable[[], bool]) -> Iterator[str]:
    """A proxy that keeps the first answer to itself and hangs up once `ready`; later connections pass."""
    target = urlsplit(url)
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        for number in range(100):
            try:
                client = listener.accept()[0]
            except OSError:
                return
            server = socket.create_connection((target.hostname, target.port))
            threading.Thread(target=copy, args=(client, server), daemon=True).start()
            if number:
                threading.Thread(target=copy, args=(server, client), daemon=True).start()
            else:
                while not ready():
                    time.sleep(0.01)
                for each in (client, server):
                    with contextlib.suppress(OSError):  # the other end may have hung up by itself
                        each.shutdown(socket.SHUT_RDWR)

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def copy(source: socket.socket, target: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def test_a_busy_session_is_a_409_with_retry_after_and_nothing_is_lost(running: Running) -> None:
    make(running)
    results: list[httpx.Response] = []

    def ask() -> None:
        with running.http() as http:
            results.append(http.post("/v1/completions", json=ASK | {"session_id": "ada", "max_tokens": 200}))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    codes = sorted(result.status_code for result in results)
    assert codes.count(200) >= 1
    assert set(codes) <= {200, 409}
    for result in results:
        if result.status_code == 409:
            assert result.json()["error"]["code"] in ("session_busy", "version_conflict")
            assert result.json()["error"]["code"] != "session_busy" or int(result.headers["Retry-After"]) >= 1
    assert session(running)["position"] == 1 + codes.count(200) * 209


def test_a_busy_session_is_told_so_before_there_is_a_lane(serve: Serve) -> None:
    running = serve(engine={"lanes": 1, "queue": 8, "threads": None, "lease": 1.0})
    make(running)
    with running.http() as http, http.stream(
        "POST", "/v1/completions", json=ASK | {"stream": True, "max_tokens": 5000, "session_id": "ada"}
    ) as response:  # fmt: skip
        events = read_events(response)
        next(events)
        began = time.monotonic()
        refused = running.http().post("/v1/completions", json=ASK | {"session_id": "ada"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "session_busy")
        assert int(refused.headers["Retry-After"]) >= 1
        assert time.monotonic() - began < 1


def test_a_refused_turn_is_not_mistaken_for_the_one_before_with_the_same_text(running: Running) -> None:
    """OpenAI's client sends a refused request again by itself; the earlier turn's answer must not be taken for this one's."""
    make(running)
    client = running.client(max_retries=2)
    ask = ASK | {"max_tokens": 4}
    client.completions.create(**ask, extra_body={"session_id": "ada", "expected_version": 1})
    position = session(running)["position"]
    with pytest.raises(openai.ConflictError) as error:
        client.completions.create(**ask, extra_body={"session_id": "ada", "expected_version": 1})
    assert error.value.code == "version_conflict"
    assert error.value.response.headers["x-should-retry"] == "false"
    assert session(running)["position"] == position
    with pytest.raises(openai.ConflictError) as error:  # another text: trying again is the client's own affair
        client.completions.create(**ask | {"prompt": "x"}, extra_body={"session_id": "ada", "expected_version": 1})
    assert "x-should-retry" not in error.value.response.headers


@pytest.mark.parametrize("status", ["done", "interrupted"])
def test_the_retry_of_a_long_turn_is_joined_by_when_it_ended(running: Running, status: str, monkeypatch) -> None:
    make(running)
    body = ASK | {"session_id": "ada"}
    running.http().post("/v1/completions", json=body).raise_for_status()
    position = session(running)["position"]
    real = running.service.store.response

    def long_ago(tenant: str, id: str):
        return replace(real(tenant, id), created=time.time() - 5000, status=status)

    monkeypatch.setattr(running.service.store, "response", long_ago)
    found = running.service.turns.known(
        running.service.store.get("local", "ada"), Attempt("local", real("local", newest(running)).request, None, True)
    )
    assert found is not None
    assert session(running)["position"] == position


def newest(running: Running) -> str:
    return max(running.service.store.response_ids("local", "ada"))


def test_a_retry_is_joined_although_another_turn_came_between(running: Running) -> None:
    make(running)
    first = running.http().post("/v1/completions", json=ASK | {"session_id": "ada"}).json()
    running.http().post("/v1/completions", json=ASK | {"session_id": "ada", "prompt": "other"}).raise_for_status()
    position = session(running)["position"]
    again = running.http().post("/v1/completions", json=ASK | {"session_id": "ada"}, headers={"x-stainless-retry-count": "1"})
    assert again.json()["id"] == first["id"]
    assert session(running)["position"] == position


def test_a_turn_of_a_session_has_one_prompt_and_a_key_one_answer(running: Running) -> None:
    make(running)
    refused = running.http().post("/v1/completions", json=ASK | {"session_id": "ada", "prompt": ["x", "y"]})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")
    refused = running.http().post("/v1/completions", json=ASK | {"n": 2}, headers={"Idempotency-Key": "k"})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert session(running)["position"] == 0


def test_who_leaves_the_queue_leaves_no_response_behind(serve: Serve) -> None:
    running = serve(engine={"lanes": 1, "queue": 8, "threads": None, "lease": 1.0})
    make(running)
    make(running, "eve")
    with running.http() as http, http.stream(
        "POST", "/v1/completions", json=ASK | {"stream": True, "max_tokens": 5000, "session_id": "ada"}
    ) as response:  # fmt: skip
        events = read_events(response)
        next(events)
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(f"{running.url}/v1/completions", json=ASK | {"session_id": "eve"}, timeout=0.5)
        until = time.monotonic() + 3
        while running.service.store.response_ids("local", "eve") and time.monotonic() < until:
            time.sleep(0.02)
        assert not running.service.store.response_ids("local", "eve")
    assert session(running, "eve")["position"] == 0


def test_expected_version_is_compared(running: Running) -> None:
    made = make(running)
    client = running.client()
    first = client.completions.create(**ASK, extra_body={"session_id": "ada", "expected_version": made["version"]})
    with pytest.raises(openai.ConflictError) as error:
        client.completions.create(**ASK, extra_body={"session_id": "ada", "expected_version": made["version"]})
    assert error.value.body["version"] == first.session["version"]
    client.completions.create(**ASK, extra_body={"session_id": "ada", "expected_version": first.session["version"]})


def test_a_turn_that_was_refused_leaves_its_key_free(serve: Serve) -> None:
    running = serve(engine={"lanes": 1, "queue": 1, "threads": None})
    make(running)
    long, keyed = ASK | {"stream": True, "max_tokens": 9000}, {"Idempotency-Key": "k"}
    with running.http() as http, http.stream("POST", "/v1/completions", json=long) as busy:
        stream = read_events(busy)  # kept: a generator that is dropped closes the connection
        next(stream)
        waiting = threading.Thread(target=running.http().post, args=("/v1/completions",), kwargs={"json": ASK})
        waiting.start()
        while running.service.turns.models[checkpoint().fingerprint].client.engine.load[1] == 0:
            time.sleep(0.005)
        refused = running.http().post("/v1/completions", json=ASK | {"session_id": "ada"}, headers=keyed)
        assert refused.status_code == 429
        assert refused.json()["error"]["code"] == "overloaded"
        assert int(refused.headers["Retry-After"]) >= 1
    waiting.join()
    again = running.http().post("/v1/completions", json=ASK | {"session_id": "ada"}, headers=keyed)
    assert again.json()["choices"][0]["text"] == expected()


def test_a_stale_writer_is_fenced(serve: Serve) -> None:
    """Two services over one store. One freezes and its lease runs out; the other goes on; the first may not write any more."""
    frozen, other = serve(), serve()
    make(frozen)
    engine = frozen.service.turns.models[checkpoint().fingerprint].client.engine
    with frozen.http() as http, http.stream(
        "POST", "/v1/completions", json=ASK | {"session_id": "ada", "stream": True, "max_tokens": 5000}
    ) as response:  # fmt: skip
        stream = read_events(response)
        next(stream)
        engine.journal.abandon()
        with engine._changed:  # its loop waits here
            deadline = time.monotonic() + 10
            while session(other)["busy"] and time.monotonic() < deadline:
                time.sleep(0.05)
            position = session(other)["position"]
            taken = other.http().post("/v1/completions", json=ASK | {"session_id": "ada", "max_tokens": 7})
            assert taken.status_code == 200, taken.text
        rest = list(stream)
    assert rest[-1][1]["error"]["code"] == "session_lost"
    assert session(other)["position"] == position + 9 + 7, "nothing of the stale writer came behind it"


@pytest.mark.needs("redis-server")
def test_sessions_in_redis_do_the_same(serve: Serve, redis_server: LocalRedis) -> None:  # noqa: F811
    first = serve(store=f"{redis_server.url}?prefix=api")
    make(first)
    body = ASK | {"session_id": "ada", "stream": True, "max_tokens": 200}
    text, last = "", ""
    with first.http() as http, http.stream("POST", "/v1/completions", json=body, headers={"Idempotency-Key": "k"}) as response:
        for id, data in read_events(response):
            text, last = text + data["choices"][0]["text"], id
            break
    second = serve(store=f"{redis_server.url}?prefix=api")
    with second.http() as http, http.stream("GET", f"/v1/streams/{last.split(':')[0]}", headers={"Last-Event-ID": last}) as rest:
        text += "".join(data["choices"][0]["text"] for _, data in read_events(rest) if data["choices"])
    assert text == expected(tokens=200)
    again = first.http().post("/v1/completions", json=body | {"stream": False}, headers={"Idempotency-Key": "k"}).json()
    assert again["choices"][0]["text"] == text
    assert session(first)["position"] == 210
