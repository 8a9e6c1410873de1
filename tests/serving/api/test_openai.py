"""The stock client of OpenAI against the service."""

import openai
import pytest

from tests.serving.api.conftest import GREEDY, Running, Serve
from tests.serving.engine.conftest import checkpoint, greedy


def text_of(prompt: str, tokens: int) -> str:
    return checkpoint().tokenizer.decode(greedy(checkpoint(), list(prompt.encode()), tokens)[0])


def test_models_are_listed_and_found(running: Running) -> None:
    client = running.client()
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError) as error:
        client.models.retrieve("large")
    assert error.value.code == "model_not_found"


def test_a_completion_is_what_the_model_says(running: Running) -> None:
    found = running.client().completions.create(model="tiny", prompt="The whale", max_tokens=20, **GREEDY)
    assert found.choices[0].text == text_of("The whale", 20)
    assert found.choices[0].finish_reason == "length"
    assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (10, 20)


def test_a_stream_joins_to_the_same_text_and_ends_with_usage(running: Running) -> None:
    stream = running.client().completions.create(
        model="tiny", prompt="The whale", max_tokens=40, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert "".join(c.choices[0].text for c in chunks if c.choices) == text_of("The whale", 40)
    assert chunks[-1].usage.completion_tokens == 40
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"


def test_a_session_goes_on_where_it_stopped(running: Running) -> None:
    client = running.client()
    running.http().post("/v1/sessions", json={"id": "ada"}).raise_for_status()
    ids = list(b"The whale")
    for version_before, prompt in [(1, "The whale"), (None, " and")]:
        if version_before is None:
            ids += list(prompt.encode())
        extra = {"session_id": "ada"} if version_before else {}
        headers = {} if version_before else {"X-Session-Id": "ada"}
        found = client.completions.create(
            model="tiny", prompt=prompt, max_tokens=12, extra_body=extra, extra_headers=headers, **GREEDY
        )  # fmt: skip
        expected = greedy(checkpoint(), ids, 12)[0]
        assert found.choices[0].text == checkpoint().tokenizer.decode(expected)
        ids += expected
        assert found.session["position"] == 1 + len(ids)
        session = running.http().get("/v1/sessions/ada").json()
        assert (session["version"], session["position"]) == (found.session["version"], found.session["position"])


def test_stops_choices_and_logprobs(running: Running) -> None:
    client = running.client()
    whole = text_of("The whale", 30)
    stop = whole[5:7]
    found = client.completions.create(model="tiny", prompt="The whale", max_tokens=30, stop=stop, **GREEDY)
    assert found.choices[0].text == whole[: whole.index(stop)]
    assert found.choices[0].finish_reason == "stop"
    many = client.completions.create(model="tiny", prompt=["a", "b"], n=2, max_tokens=5, seed=7, logprobs=2)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in many.choices}) == 4
    assert all(len(choice.logprobs.token_logprobs) == 5 for choice in many.choices)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1, max_tokens=3, **GREEDY
    )
    assert len(chat.choices[0].logprobs.content) == 3


def test_chat_streams_and_is_the_template_as_a_completion(running: Running) -> None:
    client = running.client()
    message = {"role": "user", "content": "Call me"}
    whole = client.chat.completions.create(model="tiny", messages=[message], max_tokens=20, **GREEDY)
    text = client.completions.create(model="tiny", prompt="user: Call me\nassistant: ", max_tokens=20, **GREEDY).choices[0].text
    assert whole.choices[0].message.content == text
    stream = client.chat.completions.create(model="tiny", messages=[message], max_tokens=20, stream=True, **GREEDY)
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(c.choices[0].delta.content or "" for c in chunks) == text


def test_a_chat_session_takes_new_messages_or_the_whole_history_and_nothing_else(running: Running) -> None:
    client = running.client(default_headers={"X-Session-Id": "chat"})
    running.http().post("/v1/sessions", json={"id": "chat"}).raise_for_status()

    def say(*messages: tuple[str, str]) -> str:
        given = [{"role": role, "content": content} for role, content in messages]
        found = client.chat.completions.create(model="tiny", messages=given, max_tokens=10, **GREEDY)
        return found.choices[0].message.content

    first = say(("user", "one"))
    second = say(("user", "one"), ("assistant", first), ("user", "two"))
    position = running.service.store.get("local", "chat").position
    assert position == 1 + len("user: one\nassistant: ") + 10 + len("\nuser: two\nassistant: ") + 10
    third = say(("user", "three"))
    fourth = say(
        ("user", "one"), ("assistant", first), ("user", "two"), ("assistant", second), ("user", "three"), ("assistant", third),
        ("user", "four"),
    )  # fmt: skip
    assert fourth
    with pytest.raises(openai.ConflictError) as error:
        say(("user", "one"), ("assistant", "something else"), ("user", "two"))
    assert error.value.code == "history_mismatch"
    forked = running.http().post("/v1/sessions/chat/fork", json={"id": "fork"}).json()
    assert forked["position"] == running.service.store.get("local", "chat").position
    found = running.client(default_headers={"X-Session-Id": "fork"}).chat.completions.create(
        model="tiny", max_tokens=4, messages=[
            {"role": "user", "content": "one"}, {"role": "assistant", "content": first},
            {"role": "user", "content": "two"}, {"role": "assistant", "content": second},
            {"role": "user", "content": "three"}, {"role": "assistant", "content": third},
            {"role": "user", "content": "four"}, {"role": "assistant", "content": fourth},
            {"role": "user", "content": "five"},
        ],
    )  # fmt: skip
    assert found.usage.prompt_tokens == len("\nuser: five\nassistant: ")


def test_errors_are_the_clients_own(serve: Serve) -> None:
    running = serve(engine={"lanes": 1, "queue": 1, "threads": None})
    client = running.client()
    with pytest.raises(openai.BadRequestError) as error:
        client.completions.create(model="tiny", prompt="a", extra_body={"sesion_id": "ada"})
    assert "sesion_id: unknown field" in error.value.message
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="tiny", prompt="a", extra_body={"session_id": "nobody"})
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="a", presence_penalty=1.0)
