"""Any order of operations gives what a plain dictionary gives, on each back end."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from serving.sessions.base import BaseStore
from serving.sessions.errors import (
    BusyError,
    ConflictError,
    ExistsError,
    InvalidError,
    NotFoundError,
    NotRetainedError,
    StaleError,
)
from serving.sessions.store import Change, Committed, Content, Lease, Snapshot
from tests.serving.sessions.conftest import BACKENDS, SETTINGS, maker

T = SETTINGS.segment


@dataclass
class Model:
    """A session by definition: all ids ever read, and the set of positions that can be gone back to."""

    retain: int
    keep_history: bool
    version: int = 1
    ids: list[int] = field(default_factory=list)
    bounds: list[int] = field(default_factory=lambda: [0])
    data: dict[int, bytes] = field(default_factory=dict)
    reach: set[int] = field(default_factory=lambda: {0})
    turn: int = 0
    lease: Lease | None = None

    def prune(self) -> None:
        kept = self.bounds[-(self.retain + 1) :]
        anchor = max(b for b in self.bounds if b < self.turn or b == self.turn == 0)
        near = {p for p in self.reach if p > kept[0] or p == kept[0] == 0}
        led = {p for p in self.reach if anchor < p <= self.turn or p == anchor == 0 == self.turn}
        self.reach = near | (led if anchor not in kept else set())
        self.bounds = kept if anchor in kept else [anchor, *kept]

    def append(self, ids: list[int], turn: bool, snapshot: int | None, data: bytes) -> None:
        if turn:
            self.turn = len(self.ids)
        self.reach |= set(range(len(self.ids), len(self.ids) + len(ids) + 1))
        self.ids += ids
        if snapshot is not None:
            self.bounds.append(snapshot)
            self.data[snapshot] = data
        if turn or snapshot is not None:
            self.prune()
        self.version += 1

    def back(self, position: int) -> None:
        self.ids = self.ids[:position]
        self.bounds = [b for b in self.bounds if b < position or b == position == 0]
        self.reach = {p for p in self.reach if p <= position}
        self.turn = min(self.turn, position)
        self.version += 1
        self.prune()


class Machine(RuleBasedStateMachine):
    """Drives a store and the model side by side."""

    make: Any
    names = st.sampled_from([f"s{i}" for i in range(8)])

    def __init__(self) -> None:
        super().__init__()
        self.store: BaseStore = type(self).make()
        self.models: dict[str, Model] = {}
        self.old: list[Lease] = []
        self.counter = 0

    @initialize()
    def start(self) -> None:
        self.create("s0", 1, True)

    @rule(name=names, retain=st.integers(0, 3), keep=st.booleans())
    def create(self, name: str, retain: int, keep: bool) -> None:
        chosen = replace(SETTINGS, retain=retain, keep_history=keep)
        if name in self.models:
            with pytest.raises(ExistsError):
                self.store.create("t", name, chosen)
        else:
            self.store.create("t", name, chosen)
            self.models[name] = Model(retain, keep)

    @rule(name=names)
    def lease(self, name: str) -> None:
        model = self.models.get(name)
        if model is None:
            with pytest.raises(NotFoundError):
                self.store.lease("t", name, "w", 600)
        elif model.lease is not None:
            with pytest.raises(BusyError):
                self.store.lease("t", name, "w", 600)
        else:
            model.lease = self.store.lease("t", name, "w", 600)

    @rule(name=names)
    def release(self, name: str) -> None:
        model = self.models.get(name)
        if model is not None and model.lease is not None:
            self.store.release([model.lease])
            self.old.append(model.lease)
            model.lease = None

    @rule(data=st.data(), lanes=st.sets(names, min_size=1, max_size=4), refused=st.booleans())
    def commit(self, data: st.DataObject, lanes: set[str], refused: bool) -> None:
        changes, expected = [], []
        for name in sorted(lanes & self.models.keys()):
            model = self.models[name]
            if model.lease is None:
                continue
            ids = data.draw(st.lists(st.integers(0, 999), max_size=9))
            turn = data.draw(st.booleans())
            places = [p for p in range(model.bounds[-1] + 1, len(model.ids) + len(ids)) if p % T == 0]
            place = data.draw(st.sampled_from([None, *places]))
            self.counter += 1
            content = b"%d" % self.counter + b"x" * data.draw(st.sampled_from([10, 1 << 20]))
            snapshot = None if place is None else Snapshot(place, content)
            wrong = refused and data.draw(st.booleans())
            if not (ids or turn or snapshot) and not wrong:
                continue
            changes.append(Change(model.lease, len(model.ids) + wrong, ids, snapshot, turn))
            expected.append((model, None if wrong else (ids, turn, place, content)))
        if refused:
            changes += [
                Change(lease, 0, [1]) for lease in self.old[-1:] if lease.id not in {x.lease.id for x in changes if x.lease}
            ]
        outcomes = self.store.commit(changes)
        for (model, made), outcome in zip(expected, outcomes, strict=False):
            if made is None:
                assert isinstance(outcome, ConflictError)
            else:
                model.append(*made)
                assert outcome == Committed(model.version, len(model.ids))
        assert all(isinstance(outcome, StaleError) for outcome in outcomes[len(expected) :])

    @rule(name=names, place=st.integers(0, 60))
    def rollback(self, name: str, place: int) -> None:
        model = self.models.get(name)
        if model is None:
            return
        position = min(place, len(model.ids) + 1)
        if position in model.reach:
            self.store.rollback("t", name, position, lease=model.lease)
            model.back(position)
        else:
            with pytest.raises(NotRetainedError):
                self.store.rollback("t", name, position, lease=model.lease)

    @rule(name=names, new=names, data=st.data(), cut=st.booleans())
    def fork(self, name: str, new: str, data: st.DataObject, cut: bool) -> None:
        if name not in self.models or new in self.models:
            return
        model = self.models[name]
        position = data.draw(st.sampled_from(sorted(model.reach))) if cut else None
        self.store.fork("t", name, new, position)
        made = replace(model, ids=list(model.ids), bounds=list(model.bounds), data=dict(model.data), reach=set(model.reach))
        if position is not None:
            made.back(position)
        made.version, made.lease = 1, None
        self.models[new] = made

    @rule(name=names, version=st.sampled_from([0, 1]))
    def copy(self, name: str, version: int) -> None:
        """Export and put back, under the right version and under a wrong one."""
        model = self.models.get(name)
        if model is None or model.lease is not None:
            return
        content = self.store.content("t", name)
        assert content == self.content(model)
        if version:
            self.store.put_snapshot("t", name, content, model.version)
            model.version += 1
            model.turn, model.bounds = len(model.ids), model.bounds[-1:]
            model.reach = {p for p in model.reach if p > model.bounds[0] or p == model.bounds[0] == 0}
        else:
            with pytest.raises(ConflictError):
                self.store.put_snapshot("t", name, content, model.version + 1)

    @rule(name=names)
    def delete(self, name: str) -> None:
        model = self.models.get(name)
        if model is None or model.lease is not None:
            with pytest.raises(NotFoundError if model is None else BusyError):
                self.store.delete("t", name)
        else:
            self.store.delete("t", name)
            del self.models[name]

    @rule()
    def reopen(self) -> None:
        self.store.close()
        self.store = type(self).make()

    def content(self, model: Model) -> Content:
        boundary = model.bounds[-1]
        chosen = replace(SETTINGS, retain=model.retain, keep_history=model.keep_history)
        history = tuple(model.ids) if model.keep_history else None
        ids = tuple(model.ids)
        recent = ids[max(0, boundary - 256) : boundary]
        return Content(chosen, boundary, model.data.get(boundary), recent, ids[boundary:], history)

    @invariant()
    def every_session_is_as_the_model_says(self) -> None:
        found = {session.id: session for session in self.store.list("t").sessions}
        assert found.keys() == self.models.keys()
        for name, model in self.models.items():
            session = found[name]
            assert (session.version, session.position, session.turn) == (model.version, len(model.ids), model.turn)
            assert {p for first, last in session.retained for p in range(first, last + 1)} == model.reach
            assert (session.owner == "w") == (model.lease is not None)
            assert self.store.usage("t").bytes == sum(x.bytes for x in found.values())

    def teardown(self) -> None:
        for name, model in self.models.items():
            assert self.store.content("t", name) == self.content(model)
            with pytest.raises(InvalidError):
                self.store.restore("t", "x/y", self.content(model))
            if model.lease is not None:
                self.store.release([model.lease])
        assert list(self.store.verify()) == []
        for name in self.models:
            self.store.delete("t", name)
        assert list(self.store.blobs()) == []
        assert self.store.usage().bytes == 0
        self.store.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_any_order_of_operations_gives_what_a_dictionary_gives(
    backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    folders = iter(range(10**6))

    class Chosen(Machine):
        def __init__(self) -> None:
            type(self).make = staticmethod(maker(backend, tmp_path / str(next(folders)), request))
            super().__init__()

    run_state_machine_as_test(
        Chosen,
        settings=settings(
            max_examples=12, stateful_step_count=25, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), print_blob=False,
        ),
    )  # fmt: skip
