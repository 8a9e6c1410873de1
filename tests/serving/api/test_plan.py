"""What is left of a turn, from what the store holds: property tests over every place where it can have been cut off."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from lm.data.tokenizer import ByteTokenizer
from lm.generation.sampling import Sampling
from serving.api.chat import Past, chained, recognise
from serving.api.errors import ApiError
from serving.api.plan import Plan, Text, answer, continuation, place
from serving.api.schemas import Message
from serving.config import ChatTemplate
from serving.sessions.store import Response, Session, Settings

IDS = st.lists(st.integers(0, 255), max_size=12).map(tuple)
SETTINGS = Settings("model", "tokenizer", 8)


def session(position: int, turn: int, version: int, stream: int = 7, read: tuple = ()) -> Session:
    """`read`: the last ids; before them stands something else."""
    known = ((999,) * 4 + read)[-max(1, min(position, 300)) :] if position else ()
    return Session("t", "s", SETTINGS, version, position, turn, 0, None, (), known, (), stream, None, 0, 0, None, 0, None)


@given(before=st.integers(0, 40), prompt=IDS, made=IDS, more=st.integers(1, 5), data=st.data())
@settings(max_examples=200, deadline=None)
def test_what_was_applied_and_what_is_left_make_the_whole(before: int, prompt: tuple, made: tuple, more: int, data) -> None:
    start = session(before, 0, 3)
    plan = place(Plan("completion", "model", prompt, len(made) + more, Sampling(), ("x",)), start)
    whole = ([256] if before == 0 else []) + list(prompt) + list(made)
    read = len(whole) - len(made)
    applied = data.draw(st.integers(0, len(whole)))
    ids = made[: max(0, applied - read)]
    response = Response("t", "r", "s", None, "", plan.parameters(), plan.start, ids)
    assert Plan.of(response) == plan
    now = session(before + applied, before if applied else 0, 3 + (applied > 0), read=tuple(whole[:applied]))
    request = continuation(response, now)
    assert request is not None
    rest = list(request.prompt)
    if before + applied == 0:
        rest = [256, *rest]  # the engine puts BOS before the first id
    assert whole[:applied] + rest == whole[: max(applied, read)]
    assert request.tokens == plan.tokens - len(ids)
    assert tuple(request.continued) == ids
    assert request.turn == (applied == 0)
    assert request.expected_version == now.version


@given(prompt=IDS.filter(len), made=IDS, position=st.integers(0, 60), turn=st.integers(1, 60))
@settings(max_examples=100, deadline=None)
def test_a_session_that_has_gone_on_otherwise_is_left_alone(prompt: tuple, made: tuple, position: int, turn: int) -> None:
    plan = place(Plan("completion", "model", prompt, 20, Sampling()), session(5, 0, 3))
    response = Response("t", "r", "s", None, "", plan.parameters(), plan.start, made)
    if turn != plan.turn:
        assert continuation(response, session(position, turn, 9)) is None
    assert continuation(response, session(plan.start + len(made), plan.turn, 9, stream=8)) is None
    assert continuation(response, None) is None


@given(mine=IDS, theirs=IDS, before=st.integers(1, 40))
@settings(max_examples=200, deadline=None)
def test_a_turn_that_was_not_applied_is_not_put_behind_another_that_started_there(
    mine: tuple, theirs: tuple, before: int
) -> None:
    """Two turns from one position: the session has read the other's ids, so nothing of this one may follow them."""
    plan = place(Plan("completion", "model", mine, 5, Sampling()), session(before, 0, 3))
    response = Response("t", "r", "s", None, "", plan.parameters(), plan.start)
    request = continuation(response, session(before + len(theirs), before, 5, read=theirs))
    if theirs != mine[: len(theirs)]:
        assert request is None


@given(text=st.text(max_size=20), stop=st.sampled_from([(), ("ab",), ("é", "\n")]), cut=st.integers(0, 80))
@settings(max_examples=200, deadline=None)
def test_text_is_the_same_wherever_it_is_taken_up(text: str, stop: tuple, cut: int) -> None:
    tokenizer = ByteTokenizer()
    ids = tuple(text.encode())
    plan = Plan("completion", "m", (), 5, Sampling(), stop, before=tuple("é".encode()[:1]))
    first = Text(tokenizer, plan)
    head = first.feed(ids[:cut], False)
    tail = Text(tokenizer, plan, ids[:cut]).feed(ids[cut:], True)
    whole, _ = answer(tokenizer, Response("t", "r", None, None, "", plan.parameters(), 0, ids))
    assert head + tail == whole


MESSAGES = st.lists(st.tuples(st.sampled_from(["user", "system"]), st.text(max_size=6)), min_size=1, max_size=4)


@given(old=MESSAGES, reply=st.text(max_size=6), new=MESSAGES, edit=st.booleans())
@settings(max_examples=200, deadline=None)
def test_a_resent_history_adds_what_the_new_messages_alone_add(old: list, reply: str, new: list, edit: bool) -> None:
    template = ChatTemplate()
    past = Past(len(old), chained("", old), reply)
    new = [("user", "first"), *new]

    def messages(pairs: list) -> list[Message]:
        return [Message(role=role, content=content) for role, content in pairs]

    alone = recognise(template, messages(new), past, fresh=False)
    assert recognise(template, messages([*old, ("assistant", reply), *new]), past, fresh=False) == alone
    assert alone.text.startswith("\n")
    other = [*old, ("assistant", reply + "!"), *new] if edit else [("user", "other"), *old, ("assistant", reply), *new]
    with pytest.raises(ApiError) as error:
        recognise(template, messages(other), past, fresh=False)
    assert (error.value.status, error.value.code) == (409, "history_mismatch")
    with pytest.raises(ApiError) as error:  # what begins as a conversation does, and is not this one
        recognise(template, messages([("system", "be"), *new]), past, fresh=False)
    assert (error.value.status, error.value.code) == (409, "history_mismatch")
