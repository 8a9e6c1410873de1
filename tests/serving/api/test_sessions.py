"""Sessions over HTTP: made, fed, forked, taken back, looked into, carried elsewhere, moved to another model."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lm.errors import UserError
from serving.config import ServeConfig
from serving.sessions.files import dump_session
from tests.serving.api.conftest import GREEDY, Running, Serve, read_events
from tests.serving.engine.conftest import checkpoint, greedy

ASK = {"model": "tiny", "prompt": "The whale", "max_tokens": 12, **GREEDY}


def test_made_listed_and_deleted(running: Running) -> None:
    http = running.http()
    for name in ("c", "a", "b"):
        made = http.post("/v1/sessions", json={"id": name, "seed": 5, "temperature": 0.5}).json()
        assert (made["version"], made["position"], made["seed"], made["sampling"]) == (1, 0, 5, {"temperature": 0.5})
    assert http.post("/v1/sessions", json={"id": "a"}).json()["error"]["code"] == "session_exists"
    assert http.post("/v1/sessions", json={}).json()["id"].startswith("s-")
    first = http.get("/v1/sessions?limit=2").json()
    assert ([x["id"] for x in first["data"]], first["has_more"]) == (["a", "b"], True)
    assert http.get(f"/v1/sessions?after={first['next']}").json()["data"][0]["id"] == "c"
    assert http.delete("/v1/sessions/a?expected_version=9").status_code == 409
    assert http.delete("/v1/sessions/a").json() == {"id": "a", "object": "session.deleted", "deleted": True}
    assert http.get("/v1/sessions/a").status_code == 404


def test_appended_text_is_read_with_progress_and_gives_the_same_answer(running: Running) -> None:
    http = running.http()
    text = "Call me Ishmael. Some years ago, never mind how long precisely. " * 40
    for name in ("a", "b"):
        http.post("/v1/sessions", json={"id": name})
    with http.stream("POST", "/v1/sessions/a/append", json={"text": text, "stream": True}) as response:
        events = list(read_events(response))
    got = [data for _, data in events]
    assert {id for id, _ in events} == {f"{got[-1]['id']}:0"}  # every event says how to go on, though no token is made
    with http.stream("GET", f"/v1/streams/{got[-1]['id']}", headers={"Last-Event-ID": events[0][0]}) as response:
        resumed = [data for _, data in read_events(response)]
    assert resumed[0]["choices"][0]["finish_reason"] == "length"
    assert resumed[0]["session"]["position"] == 1 + len(text)
    assert got[-1]["session"]["position"] == 1 + len(text)
    assert got[-1]["usage"]["prompt_tokens"] == 1 + len(text)
    done = http.post("/v1/sessions/b/append", json={"ids": list(text.encode())}, headers={"Idempotency-Key": "x"}).json()
    again = http.post("/v1/sessions/b/append", json={"ids": list(text.encode())}, headers={"Idempotency-Key": "x"}).json()
    assert again["session"] == done["session"]
    answers = [http.post("/v1/completions", json=ASK | {"session_id": name}).json()["choices"][0]["text"] for name in "ab"]
    assert answers == [checkpoint().tokenizer.decode(greedy(checkpoint(), list((text + "The whale").encode()), 12)[0])] * 2


def test_fork_rollback_and_regenerate(running: Running) -> None:
    http = running.http()
    http.post("/v1/sessions", json={"id": "a"})
    ask = ASK | {"session_id": "a", "temperature": 1.0}
    http.post("/v1/completions", json=ask)
    before = http.get("/v1/sessions/a").json()
    first = http.post("/v1/completions", json=ask).json()
    fork = http.post("/v1/sessions/a/fork", json={"id": "f", "position": before["position"]}).json()
    assert (fork["position"], fork["parent"]) == (before["position"], "a")
    back = http.post("/v1/sessions/a/rollback", json={"expected_version": first["session"]["version"]}).json()
    assert back["position"] == before["position"]
    assert http.post("/v1/sessions/a/rollback", json={"position": 9999}).json()["error"]["code"] == "position_not_retained"
    second = http.post("/v1/completions", json=ask).json()
    assert second["session"]["position"] == first["session"]["position"]
    assert second["choices"][0]["text"] != first["choices"][0]["text"], "another stream of random numbers"


def test_exported_and_imported_memory_goes_on_the_same(running: Running) -> None:
    http = running.http()
    http.post("/v1/sessions", json={"id": "a"})
    http.post("/v1/completions", json=ASK | {"session_id": "a"})
    answer = http.get("/v1/sessions/a/memory")
    file, now = answer.content, http.get("/v1/sessions/a").json()
    assert int(answer.headers["Content-Length"]) == len(file)
    assert [int(answer.headers[f"X-Session-{name}"]) for name in ("Version", "Position")] == [now["version"], now["position"]]
    made = http.put("/v1/sessions/b/memory", content=file).json()
    assert made["position"] == 22
    assert http.put("/v1/sessions/b/memory", content=file).json()["error"]["code"] == "session_exists"
    assert http.put("/v1/sessions/b/memory?expected_version=1", content=file).json()["version"] == 2
    assert http.put("/v1/sessions/c/memory", content=file[:-40]).status_code == 400
    damaged = bytearray(file)
    damaged[-20] ^= 1
    assert http.put("/v1/sessions/c/memory", content=bytes(damaged)).status_code == 400
    texts = [http.post("/v1/completions", json=ASK | {"session_id": name}).json()["choices"][0]["text"] for name in "ab"]
    assert texts[0] == texts[1]


def test_a_hostile_files_sampling_is_a_400_and_makes_no_session(running: Running) -> None:
    http = running.http()
    http.post("/v1/sessions", json={"id": "a", "temperature": 0.5})
    http.post("/v1/completions", json=ASK | {"session_id": "a"})
    content = running.service.store.content("local", "a")
    for sampling in ({"foo": 1}, {"temperature": -1}, {"top_k": "many"}, {"stream": 3}):
        file = dump_session(replace(content, settings=replace(content.settings, sampling=sampling)))
        answer = http.put("/v1/sessions/b/memory", content=file)
        assert answer.status_code == 400, sampling
        assert "sampling" in answer.json()["error"]["message"]
    assert http.get("/v1/sessions/b").status_code == 404


def test_the_same_weights_under_two_names_are_refused(serve: Serve, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="under two names"):
        serve(models=[{"checkpoint": str(folder), "name": "a"}, {"checkpoint": str(folder), "name": "b"}])
    shutil.copytree(folder, tmp_path / "copy")
    with pytest.raises(UserError, match="same weights"):
        serve(models=[{"checkpoint": str(folder)}, {"checkpoint": str(tmp_path / "copy")}])
    serve(models=[{"checkpoint": str(folder)}, {"checkpoint": str(folder), "name": "old", "use": "retired"}])


def test_a_look_into_the_memory(running: Running) -> None:
    http = running.http()
    http.post("/v1/sessions", json={"id": "a"})
    assert http.get("/v1/sessions/a/inspect").status_code == 400
    http.post("/v1/completions", json=ASK | {"session_id": "a"})
    answer = http.get("/v1/sessions/a/inspect")
    found = answer.json()
    assert (found["position"], found["version"]) == (22, http.get("/v1/sessions/a").json()["version"])
    assert (answer.headers["X-Session-Position"], answer.headers["X-Session-Version"]) == ("22", str(found["version"]))
    assert len(found["layers"][0]["working_norms"]) == 4


def test_a_session_goes_to_its_own_model_and_can_be_moved_when_that_is_retired(
    serve: Serve, folder: Path, other_folder: Path
) -> None:
    both = [{"checkpoint": str(folder)}, {"checkpoint": str(other_folder)}]
    running = serve(models=both)
    http = running.http()
    assert [model["id"] for model in http.get("/v1/models").json()["data"]] == ["tiny", "other"]
    http.post("/v1/sessions", json={"id": "kept", "model": "other", "keep_history": True})
    http.post("/v1/sessions", json={"id": "lost", "model": "other"})
    for name in ("kept", "lost"):
        answer = http.post("/v1/completions", json=ASK | {"session_id": name}).json()
        assert answer["model"] == "other"
    after = serve(models=[both[0], both[1] | {"use": "retired"}]).http()
    assert [model["id"] for model in after.get("/v1/models").json()["data"]] == ["tiny"]
    for name, actions in (("kept", ["migrate", "export", "delete"]), ("lost", ["export", "delete"])):
        error = after.post("/v1/completions", json=ASK | {"session_id": name}).json()["error"]
        assert error["code"] == "session_model_retired"
        assert [choice["action"] for choice in error["choices"]] == actions
    assert after.get("/v1/sessions/lost/memory").status_code == 200
    assert after.post("/v1/sessions/lost/migrate", json={"model": "tiny"}).status_code == 400
    moved = after.post("/v1/sessions/kept/migrate", json={"model": "tiny"}).json()
    assert (moved["model"], moved["position"]) == ("tiny", 22)
    ids = [*b"The whale", *greedy(checkpoint(seed=1), list(b"The whale"), 12)[0], *b"The whale"]
    found = after.post("/v1/completions", json=ASK | {"session_id": "kept"}).json()
    assert found["choices"][0]["text"] == checkpoint().tokenizer.decode(greedy(checkpoint(), ids, 12)[0])


def test_bfloat16_is_served_and_a_session_of_another_type_is_told_which(serve: Serve) -> None:
    long = ASK | {"prompt": "The whale " * 10}
    of = {kind: serve(engine={"lanes": 2, "dtype": kind}).http() for kind in ("float32", "bfloat16")}
    for kind, http in of.items():
        http.post("/v1/sessions", json={"id": kind})
        for turn in (1, 2):
            answer = http.post("/v1/completions", json=long | {"session_id": kind})
            assert (answer.status_code, answer.json()["session"]["position"]) == (200, 1 + turn * 112)
    refused = of["bfloat16"].post("/v1/completions", json=long | {"session_id": "float32"})
    assert refused.status_code == 400
    assert "engine.dtype" in refused.json()["error"]["message"]


def test_metrics_of_one_process(running: Running) -> None:
    running.http().post("/v1/completions", json=ASK)
    text = running.http().get("/metrics").text
    assert 'pmi_tokens_out_total{model="tiny",tenant="local"} 12.0' in text
    assert "pmi_first_token_seconds_count" in text


def test_a_resumed_stream_counts_what_it_makes(running: Running) -> None:
    http = running.http()

    def counted() -> tuple[float, float]:
        """Seconds between tokens, all together, and tokens sent."""
        lines = dict(line.rsplit(" ", 1) for line in http.get("/metrics").text.splitlines() if line.startswith("pmi_to"))
        seconds = lines.get('pmi_token_seconds_sum{model="tiny"}', "0")
        return float(seconds), float(lines['pmi_tokens_out_total{model="tiny",tenant="local"}'])

    with http.stream("POST", "/v1/completions", json=ASK | {"stream": True}) as response:
        name = [id for id, _ in read_events(response) if id][-1].rpartition(":")[0]
    assert counted()[1] == 12
    for at in (12, 5):  # what is brought again was made before
        with http.stream("GET", f"/v1/streams/{name}", headers={"Last-Event-ID": f"{name}:{at}"}) as response:
            assert list(read_events(response))
        assert counted()[0] < 5, "not the time since the machine was started"
        assert counted()[1] == 12


def test_without_keys_only_this_machine_may_ask() -> None:
    for http in ({"host": "0.0.0.0"}, {"host": "0.0.0.0", "throughput": True}):
        with pytest.raises(ValueError, match="without API keys only"):
            ServeConfig.model_validate({"http": http})
    ServeConfig.model_validate({"http": {"throughput": True}})  # HAProxy listens where http.host says


def test_a_replica_on_a_gpu_needs_one_reserved() -> None:
    with pytest.raises(ValueError, match="--set scaling"):
        ServeConfig.model_validate({"engine": {"device": "cuda"}})
    assert ServeConfig.model_validate({"engine": {"device": "cuda"}, "scaling": {"engine_gpus": 1}}).engine.device == "cuda"
