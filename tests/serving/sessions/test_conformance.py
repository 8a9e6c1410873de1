"""What every session store does, on each back end."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from serving.sessions.base import BaseStore
from serving.sessions.errors import (
    BusyError,
    ConflictError,
    ExistsError,
    InvalidError,
    KeyReusedError,
    NotFoundError,
    NotRetainedError,
    StaleError,
    StoreError,
)  # fmt: skip
from serving.sessions.store import Change, Committed, Content, Lease, Limits, Outcome, Progress, Response, Snapshot
from tests.serving.sessions.conftest import BACKENDS, SETTINGS, Clock, Make

A = "acme"
SMALL, LARGE = b"s" * 1000, b"L" * (1 << 20) + b"!"


def made(outcomes: Sequence[Outcome]) -> Committed:
    (outcome,) = outcomes
    if isinstance(outcome, StoreError):
        raise outcome
    return outcome


def begin(store: BaseStore, id: str = "s", **settings: object) -> Lease:
    store.create(A, id, replace(SETTINGS, **settings))  # type: ignore[arg-type]
    return store.lease(A, id, "writer")


def feed(store: BaseStore, lease: Lease, count: int, data: bytes = SMALL, turn: bool = True) -> None:
    """Append ids 0, 1, 2, ... (each its position) as an engine does: one by one, a snapshot when a boundary is passed."""
    start = store.get(A, lease.id).position
    for at in range(start, start + count):
        snapshot = Snapshot(at, data + str(at).encode()) if at and at % SETTINGS.segment == 0 else None
        made(store.commit([Change(lease, at, [at], snapshot, turn=turn and at == start)]))


def test_a_session_is_its_snapshot_and_the_ids_since(store: BaseStore) -> None:
    lease = begin(store, sampling={"temperature": 0.5}, seed=7)
    feed(store, lease, 11)
    session = store.get(A, "s")
    assert (session.position, session.boundary, session.tail) == (11, 8, (8, 9, 10))
    assert session.recent == tuple(range(8))
    assert store.snapshot(session) == SMALL + b"8"
    assert session.version == 12
    assert session.settings == replace(SETTINGS, sampling={"temperature": 0.5}, seed=7)
    assert session.owner == "writer"
    store.release([lease])
    assert store.get(A, "s").owner is None


def test_only_the_last_256_ids_before_the_boundary_are_recent(store: BaseStore) -> None:
    lease = begin(store)
    made(store.commit([Change(lease, 0, range(401), Snapshot(400, SMALL))]))
    assert store.get(A, "s").recent == tuple(range(144, 400))


@pytest.mark.parametrize("make", BACKENDS, indirect=True)
def test_everything_is_still_there_when_the_store_is_opened_again(make: Make) -> None:
    first = make()
    feed(first, begin(first), 7, LARGE)
    before = first.get(A, "s")
    first.close()
    second = make()
    assert replace(second.get(A, "s"), owner=None) == replace(before, owner=None)
    assert second.snapshot(before) == LARGE + b"4"
    second.close()


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_rollback_goes_to_any_retained_position_and_to_no_other(store: BaseStore, data: bytes) -> None:
    lease = begin(store, retain=1)
    feed(store, lease, 6, data)
    feed(store, lease, 12, data)  # the last turn starts at 6; boundaries 12 and 16 are retained, and 4 for the turn
    store.release([lease])
    session = store.get(A, "s")
    assert session.retained == ((5, 6), (13, 18))
    for position in (0, 4, 7, 12, 19):
        with pytest.raises(NotRetainedError, match=r"5\.\.6, 13\.\.18"):
            store.rollback(A, "s", position)
    back = store.rollback(A, "s", 15)
    assert (back.boundary, back.tail, back.version) == (12, (12, 13, 14), session.version + 1)
    assert back.stream != session.stream
    back = store.rollback(A, "s", 6, expected_version=back.version)
    assert (back.boundary, back.tail, back.turn) == (4, (4, 5), 6)
    assert store.snapshot(back) == data + b"4"
    feed(store, store.lease(A, "s", "again"), 12, data)
    assert store.get(A, "s").tail == (16, 17)
    assert list(store.verify()) == []


def test_the_first_turn_can_be_taken_back_whole(store: BaseStore) -> None:
    lease = begin(store, retain=0)
    feed(store, lease, 30)
    store.release([lease])
    assert store.rollback(A, "s", 0).tail == ()
    assert store.get(A, "s").snapshot is None
    assert [refs for _, refs in store.blobs()] == []


def test_more_boundaries_are_retained_where_asked(store: BaseStore) -> None:
    for retain, spans in ((0, ((0, 0), (41, 42))), (3, ((0, 0), (29, 42))), (99, ((0, 42),))):
        lease = begin(store, f"s{retain}", retain=retain)
        feed(store, lease, 42)
        assert store.get(A, f"s{retain}").retained == spans


@pytest.mark.parametrize("make", BACKENDS, indirect=True)
def test_a_fork_shares_snapshots_and_goes_its_own_way(store: BaseStore) -> None:
    lease = begin(store)
    feed(store, lease, 10, LARGE)
    fork = store.fork(A, "s", "f")
    assert (fork.tail, fork.snapshot, fork.parent, fork.version) == ((8, 9), store.get(A, "s").snapshot, "s", 1)
    assert fork.stream != store.get(A, "s").stream
    assert sorted(refs for _, refs in store.blobs()) == [2, 2]
    other = store.lease(A, "f", "x")
    feed(store, other, 3, b"other")
    assert store.get(A, "s").position == 10
    earlier = store.fork(A, "s", "g", position=6)
    assert (earlier.position, earlier.tail) == (6, (4, 5))
    with pytest.raises(ExistsError, match="'f' exists"):
        store.fork(A, "s", "f")
    store.release([lease, other])
    for id in ("s", "f", "g"):
        assert store.snapshot(store.get(A, id)) is not None
        store.delete(A, id)
    assert list(store.blobs()) == []
    assert list(store.verify()) == []
    assert store.usage() == type(store.usage())(0, 0, 0, 0)


def test_a_stale_writer_is_refused_and_leaves_nothing(store: BaseStore, make: Make) -> None:
    old = begin(store)
    feed(store, old, 3)
    other = make()
    store.release([old])
    new = other.lease(A, "s", "other")
    assert new.fence > old.fence
    response, _ = store.begin(Response(A, "r", "s", None, "hash", {}, 3))
    refused = store.commit([Change(old, 3, [9], response=Progress(response.id, 0, [9]))])[0]
    assert isinstance(refused, StaleError)
    assert store.get(A, "s").tail == (0, 1, 2)
    assert store.response(A, "r").ids == ()
    assert isinstance(store.heartbeat([old])[0], StaleError)
    store.release([old])  # passed over
    assert made(other.commit([Change(new, 3, [3])])).position == 4
    assert isinstance(store.commit([Change(old, 4, [9])])[0], StaleError)
    other.close()


def test_a_lease_that_was_given_back_is_worth_nothing(store: BaseStore) -> None:
    lease = begin(store)
    store.release([lease])
    assert isinstance(store.commit([Change(lease, 0, [1])])[0], StaleError)
    assert isinstance(store.heartbeat([lease])[0], StaleError)
    assert store.get(A, "s").version == 1


def test_a_lease_of_a_deleted_session_is_worth_nothing_in_its_successor(store: BaseStore) -> None:
    old = begin(store)
    store.release([old])
    store.delete(A, "s")
    assert isinstance(store.commit([Change(old, 0, [1])])[0], StaleError)
    begin(store)
    assert isinstance(store.commit([Change(old, 0, [1])])[0], StaleError)
    assert store.get(A, "s").position == 0


def test_a_second_writer_waits_until_the_lease_is_given_back_or_lapses(make: Make, clock: Clock) -> None:
    store = make(clock=clock)
    lease = begin(store)
    with pytest.raises(BusyError, match="'writer'") as caught:
        store.lease(A, "s", "second")
    assert 0 < caught.value.seconds <= 4
    clock.now += 3
    assert store.heartbeat([lease]) == [lease]
    clock.now += 3
    for attempt in (
        lambda: store.lease(A, "s", "second"), lambda: store.rollback(A, "s", 0), lambda: store.delete(A, "s"),
        lambda: store.put_snapshot(A, "s", Content(SETTINGS, 0, None, (), (1,)), 1),
    ):  # fmt: skip
        with pytest.raises(BusyError):
            attempt()
    clock.now += 1.1
    second = store.lease(A, "s", "second")
    assert isinstance(store.commit([Change(lease, 0, [1])])[0], StaleError)
    made(store.commit([Change(second, 0, [2])]))
    clock.now += 3.9
    made(store.commit([Change(second, 1, [3])]))  # a commit is a sign of life
    clock.now += 3.9
    with pytest.raises(BusyError):
        store.lease(A, "s", "third")
    store.close()


def test_what_changes_a_session_without_a_lease_fences_off_a_writer_that_was_presumed_dead(make: Make, clock: Clock) -> None:
    store = make(clock=clock)
    lease = begin(store)
    feed(store, lease, 6)
    clock.now += 5
    store.rollback(A, "s", 3)
    assert isinstance(store.commit([Change(lease, 6, [6])])[0], StaleError)
    assert isinstance(store.commit([Change(lease, 3, [6])])[0], StaleError)
    store.close()


def test_one_refused_change_does_not_stand_in_the_way_of_the_others(store: BaseStore) -> None:
    leases = [begin(store, f"s{i}") for i in range(5)]
    lost = replace(leases[2], fence=leases[2].fence + 100)
    outcomes = store.commit(
        [
            Change(leases[0], 0, [1], turn=True),
            Change(leases[1], 5, [1]),
            Change(lost, 0, [1]),
            Change(leases[3], 0, [1] * 5, Snapshot(3, SMALL)),
            Change(leases[4], 0, [1] * 5, Snapshot(4, LARGE)),
        ]
    )
    kinds = [type(outcome) for outcome in outcomes]
    assert kinds == [Committed, ConflictError, StaleError, InvalidError, Committed]
    assert "'s1': ids for position 5, the session is at 0" in str(outcomes[1])
    assert "multiple of the segment 4" in str(outcomes[3])
    assert [store.get(A, f"s{i}").position for i in range(5)] == [1, 0, 0, 0, 5]
    with pytest.raises(InvalidError, match="two changes of one session"):
        store.commit([Change(leases[0], 1, [1]), Change(leases[0], 2, [1])])


@pytest.mark.parametrize("place", [0, 3, 4, 8, 9, 12])
def test_a_snapshot_must_lie_at_a_boundary_between_the_last_one_and_the_newest_id(store: BaseStore, place: int) -> None:
    lease = begin(store)
    feed(store, lease, 6)
    (outcome,) = store.commit([Change(lease, 6, [6, 7], Snapshot(place, SMALL))])
    assert isinstance(outcome, InvalidError)
    assert store.get(A, "s").position == 6


def test_committing_the_same_change_again_changes_nothing(store: BaseStore, make: Make) -> None:
    lease = begin(store)
    store.begin(Response(A, "r", "s", None, "hash", {}, 0))
    other = make()  # remembers nothing: as a writer whose answer was lost would find it
    change = Change(lease, 0, range(6), Snapshot(4, SMALL), True, 1, Progress("r", 0, [1, 2]))
    first = made(store.commit([change]))
    assert made(store.commit([change])) == made(other.commit([change])) == first == Committed(2, 6)
    assert store.response(A, "r").ids == (1, 2)
    assert isinstance(store.commit([replace(change, ids=[9] * 6)])[0], ConflictError)
    assert list(store.verify()) == []
    other.close()


def test_a_change_may_name_the_version_it_expects(store: BaseStore) -> None:
    lease = begin(store)
    made(store.commit([Change(lease, 0, [1], expected_version=1)]))
    (outcome,) = store.commit([Change(lease, 1, [1], expected_version=7)])
    assert isinstance(outcome, ConflictError)
    assert outcome.found == 2
    assert made(store.commit([Change(lease, 1, expected_version=2)])) == Committed(2, 1)  # only a look


def test_put_snapshot_replaces_the_content_of_the_expected_version_only(store: BaseStore) -> None:
    lease = begin(store)
    feed(store, lease, 6, LARGE)
    store.release([lease])
    content = Content(replace(SETTINGS, model="other"), 8, b"new", tuple(range(8)), (5, 6))
    with pytest.raises(ConflictError, match="version 3 was expected, it is at 7"):
        store.put_snapshot(A, "s", content, 3)
    put = store.put_snapshot(A, "s", content, 7)
    assert (put.version, put.position, put.settings.model, put.tail) == (8, 10, "other", (5, 6))
    assert store.content(A, "s") == content
    assert [refs for _, refs in store.blobs()] == [1]


def test_content_that_contradicts_itself_is_refused_with_every_problem(store: BaseStore) -> None:
    with pytest.raises(InvalidError) as caught:
        store.restore(A, "s", Content(replace(SETTINGS, keep_history=True), 6, None, (), ()))
    assert len(caught.value.problems) == 5


def test_a_kept_history_holds_every_id_through_forks_and_rollbacks(store: BaseStore) -> None:
    lease = begin(store, keep_history=True, retain=3)
    feed(store, lease, 23)
    store.release([lease])
    store.fork(A, "s", "f")
    store.fork(A, "s", "g", position=14)
    assert store.history(A, "g") == tuple(range(14))
    store.rollback(A, "f", 15)
    other = store.lease(A, "f", "x")
    made(store.commit([Change(other, 15, [99] * 3, Snapshot(16, SMALL))]))
    store.release([other])
    assert store.history(A, "f") == (*range(15), 99, 99, 99)
    assert store.history(A, "s") == tuple(range(23))
    content = store.content(A, "f")
    assert store.restore(A, "h", content).position == 18
    assert store.content(A, "h") == content
    begin(store, "plain")
    with pytest.raises(InvalidError, match="keeps no history"):
        store.history(A, "plain")
    assert list(store.verify()) == []


def test_tenants_do_not_see_each_other_and_lists_are_paged(store: BaseStore) -> None:
    ids = [f"s{i:02}" for i in range(25)]
    for id in ids:
        store.create(A, id, SETTINGS)
    store.create("a-b", "s05", replace(SETTINGS, model="model-2"))
    store.create("acme2", "other", SETTINGS)
    seen: list[str] = []
    after = None
    while True:
        page = store.list(A, after, limit=10)
        seen += [session.id for session in page.sessions]
        after = page.next
        if after is None:
            break
    assert seen == ids
    every = store.list(None, limit=1000).sessions
    assert [(x.tenant, x.id) for x in every] == sorted((x.tenant, x.id) for x in every)
    assert len(every) == 27
    assert store.list(None, "acme/s24").sessions[0].id == "other"
    assert [x.tenant for x in store.list(None, model="model-2").sessions] == ["a-b"]
    with pytest.raises(NotFoundError):
        store.get("acme2", "s05")
    assert store.usage(A).sessions == 25
    assert store.usage().sessions == 27


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a b", "é", "x" * 129, "-x", "a\0b", "a\n"])
def test_names_that_could_mean_something_else_are_refused(store: BaseStore, name: str) -> None:
    for call in (lambda: store.create(A, name, SETTINGS), lambda: store.get(name, "s"), lambda: store.list(name)):
        with pytest.raises(InvalidError, match="must be 1 to 128"):
            call()


def test_no_name_can_be_taken_for_a_part_of_another(store: BaseStore) -> None:
    ids = ["x", "x:history", "x:pieces", "h:x", "s:x"]
    for id in ids:
        lease = begin(store, id, keep_history=True)
        store.begin(Response(A, id, id, id, "hash", {}, 0))
        made(store.commit([Change(lease, 0, range(10), Snapshot(8, id.encode()), response=Progress(id, 0, [1]))]))
        store.release([lease])
    for id in ids:
        assert store.history(A, id) == tuple(range(10))
        assert store.snapshot(store.get(A, id)) == id.encode()
        assert [x.ids for x in store.responses(A, id)] == [(1,)]
        store.delete(A, id)
    assert list(store.verify()) == []


def test_an_expired_session_is_gone_at_once_and_evicted_with_all_that_is_its(make: Make, clock: Clock) -> None:
    store = make(Limits(ttl=100), clock)
    feed(store, begin(store, "default"), 6, LARGE)
    feed(store, begin(store, "own", ttl=10), 6)
    held = begin(store, "leased", ttl=10)
    clock.now += 11
    assert store.evict().sessions == 2  # the leases have lapsed, too
    clock.now -= 11
    with pytest.raises(NotFoundError):
        store.get(A, "own")
    assert isinstance(store.commit([Change(held, 0, [1])])[0], StaleError)
    store.create(A, "own", replace(SETTINGS, ttl=10))
    lease = store.lease(A, "own", "w", seconds=100)
    clock.now += 50
    assert store.get(A, "own").owner == "w"
    assert store.evict().sessions == 0
    store.release([lease])
    with pytest.raises(NotFoundError):
        store.get(A, "own")
    assert [x.id for x in store.list(A).sessions] == ["default"]
    store.create(A, "own", SETTINGS)  # its name is free
    clock.now += 51
    assert store.evict().sessions == 1
    assert store.get(A, "own").version == 1
    assert store.usage().sessions == 1
    assert list(store.blobs()) == list(store.verify()) == []
    store.close()


def test_over_the_cap_the_longest_unchanged_go_first_and_leased_ones_never(make: Make, clock: Clock) -> None:
    store = make(Limits(bytes=30_000), clock)
    for i in range(10):
        lease = begin(store, f"s{i}")
        feed(store, lease, 6)
        if i != 1:
            store.release([lease])
        clock.now += 1
        if i == 1:
            held = lease
    store.heartbeat([held])
    evicted = store.evict()
    left = [x.id for x in store.list(A).sessions]
    assert left == ["s1", *[f"s{i}" for i in range(10 - len(left) + 1, 10)]]
    assert evicted.sessions == 10 - len(left) > 3
    assert store.usage().bytes <= 30_000 < store.usage().bytes + evicted.bytes / evicted.sessions
    assert list(store.verify()) == []
    store.close()


def test_a_response_keeps_its_ids_and_is_found_again_by_its_key(store: BaseStore) -> None:
    lease = begin(store)
    asked = Response(A, "r1", "s", "key-1", "hash", {"max_tokens": 5}, 1)
    assert store.begin(asked)[1] is True
    again, new = store.begin(replace(asked, id="r2"))
    assert (again.id, new) == ("r1", False)
    with pytest.raises(ConflictError, match="'key-1' was used for another request"):
        store.begin(replace(asked, id="r2", request="other"))
    with pytest.raises(ExistsError):
        store.begin(replace(asked, key=None))
    for at in range(5):
        made(store.commit([Change(lease, at, [at], response=Progress("r1", at, [at * 2]))]))
    assert isinstance(store.commit([Change(lease, 5, [5], response=Progress("r1", 3, [1]))])[0], ConflictError)
    assert isinstance(store.commit([Change(lease, 5, [5], response=Progress("nil", 0, [1]))])[0], NotFoundError)
    assert store.get(A, "s").position == 5
    assert store.response(A, "r1").ids == (0, 2, 4, 6, 8)
    made(store.commit([Change(lease, 5, response=Progress("r1", 5, status="interrupted"))]))
    assert store.get(A, "s").version == 6  # the session itself did not change
    assert store.response(A, "r1").status == "interrupted"
    made(store.commit([Change(lease, 5, [5], response=Progress("r1", 5, [10]))]))
    made(store.commit([Change(lease, 6, [6], response=Progress("r1", 6, [12], "done", {"reason": "stop"}))]))
    found = store.response(A, "r1")
    assert (found.ids, found.status, found.detail) == ((0, 2, 4, 6, 8, 10, 12), "done", {"reason": "stop"})
    assert (found.parameters, found.start, found.session) == ({"max_tokens": 5}, 1, "s")
    assert [x.id for x in store.responses(A, "s")] == ["r1"]
    with pytest.raises(NotFoundError):
        store.response("other", "r1")
    store.release([lease])
    store.delete(A, "s")
    with pytest.raises(NotFoundError):
        store.response(A, "r1")
    assert store.begin(replace(asked, session=None))[1] is True  # its key is free, too
    assert list(store.verify()) == []


def test_a_response_needs_no_session(store: BaseStore) -> None:
    store.begin(Response(A, "r", None, None, "hash", {}, 0))
    assert made(store.commit([Change(None, response=Progress("r", 0, [1, 2], tenant=A))])).position == 2
    assert made(store.commit([Change(None, response=Progress("r", 2, [3], "done", tenant=A))])).position == 3
    assert store.response(A, "r").ids == (1, 2, 3)
    (outcome,) = store.commit([Change(None, ids=[1])])
    assert isinstance(outcome, InvalidError)


def test_responses_expire_and_are_capped_but_running_ones_stay(make: Make, clock: Clock) -> None:
    store = make(Limits(response_ttl=100, response_bytes=4000), clock)
    for i in range(10):
        store.begin(Response(A, f"r{i}", None, f"k{i}", "hash", {}, 0))
        done = "running" if i == 2 else "done"
        made(store.commit([Change(None, response=Progress(f"r{i}", 0, range(100), done, tenant=A))]))
        clock.now += 1
    assert store.evict().responses == 3
    assert store.response(A, "r2").status == "running"
    assert store.response(A, "r9").ids == tuple(range(100))
    assert store.usage(A).response_bytes <= 4000
    clock.now += 200
    with pytest.raises(NotFoundError):
        store.response(A, "r9")
    assert store.begin(Response(A, "new", None, "k9", "other", {}, 0))[1] is True
    store.evict()
    assert [id for _, id in store.all_responses()] == ["new"]
    assert store.usage().responses == 1
    store.close()


def test_over_the_cap_the_tenant_with_most_responses_loses_its_oldest(make: Make, clock: Clock) -> None:
    store = make(Limits(response_bytes=4000), clock)
    for tenant, count in (("modest", 3), ("greedy", 12), ("late", 1)):
        for i in range(count):
            store.begin(Response(tenant, f"{tenant}{i}", None, None, "hash", {}, 0))
            made(store.commit([Change(None, response=Progress(f"{tenant}{i}", 0, range(100), "done", tenant=tenant))]))
            clock.now += 1
    evicted = store.evict()
    left = sorted(id for _, id in store.all_responses())
    kept = 12 - evicted.responses
    assert left == sorted(["late0", *(f"modest{i}" for i in range(3)), *(f"greedy{i}" for i in range(12 - kept, 12))])
    assert store.usage().response_bytes <= 4000 < store.usage().response_bytes + evicted.bytes / evicted.responses
    assert store.evict().responses == 0
    assert list(store.verify()) == []
    store.close()


def test_a_key_that_was_used_for_another_request_is_told_from_other_conflicts(store: BaseStore) -> None:
    store.begin(Response(A, "r1", None, "key", "hash", {}, 0))
    with pytest.raises(KeyReusedError):
        store.begin(Response(A, "r2", None, "key", "other", {}, 0))


@pytest.mark.parametrize("changes", [{"retain": 1025}, {"ttl": 1e11}], ids=str)
def test_what_the_api_does_not_allow_no_content_brings_in(store: BaseStore, changes: dict[str, float]) -> None:
    with pytest.raises(InvalidError, match=next(iter(changes))):
        store.restore(A, "s", Content(replace(SETTINGS, **changes), 0, None, (), ()))  # type: ignore[arg-type]
