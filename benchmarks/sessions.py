"""What a session store costs: committing a step, committing a snapshot, resuming; SQLite and Redis, at three sizes of snapshot.

python -m benchmarks.sessions                  # about two minutes; needs redis-server on PATH

All contenders take turns in one process. The reference is the least that durability can cost: writing the same bytes to a file,
fsync, rename. Figures are medians (and quartiles) in milliseconds, and ratios over the reference of the same rounds.
"""

import argparse
import itertools
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.measure import in_turns, ratio, save
from lm.data.files import write_atomically
from serving.sessions.base import BaseStore
from serving.sessions.local_redis import LocalRedis
from serving.sessions.redis import RedisStore
from serving.sessions.sqlite import SQLiteStore
from serving.sessions.store import Change, Committed, Lease, Settings, Snapshot

SIZES = {"100 KB": 100_000, "1.6 MB": 1_600_000, "25 MB": 25_000_000}
SEGMENT = 64
LANES = 32
YOUNG, OLD = 10_000, 1_000_000
"""Tokens of history of the two sessions whose resuming is compared."""


class Lane:
    """One session that is written to."""

    def __init__(self, store: BaseStore, id: str, size: int) -> None:
        store.create("t", id, Settings("model", "tokenizer", SEGMENT, retain=0))
        self.store, self.lease, self.at, self.size = store, store.lease("t", id, "benchmark", 3600), 0, size
        self.noise = os.urandom(size)
        self.count = itertools.count()

    def token(self) -> Change:
        """One id."""
        change = Change(self.lease, self.at, [self.at % 1000])
        self.at += 1
        return change

    def boundary(self) -> Change:
        """The rest of a segment, with a snapshot at its boundary."""
        place = (self.at // SEGMENT + 1) * SEGMENT
        ids = [x % 1000 for x in range(self.at, place + 1)]
        change = Change(self.lease, self.at, ids, Snapshot(place, next(self.count).to_bytes(8, "little") + self.noise[8:]))
        self.at = place + 1
        return change

    def jump(self, tokens: int) -> None:
        """Read on to a position."""
        end = (tokens - 1) // SEGMENT * SEGMENT
        ids = [x % 1000 for x in range(self.at, tokens)]
        commit(self.store, [Change(self.lease, self.at, ids, Snapshot(end, self.noise))])
        self.at = tokens


def commit(store: BaseStore, changes: list[Change]) -> None:
    """Commit; every change must be made."""
    for outcome in store.commit(changes):
        if not isinstance(outcome, Committed):
            raise outcome


def resume(store: BaseStore, id: str) -> Callable[[], None]:
    """What resuming asks of the store."""

    def run() -> None:
        store.snapshot(store.get("t", id))

    return run


def measure(stores: dict[str, BaseStore], folder: Path, name: str, size: int, rounds: int) -> dict[str, Any]:
    """All contenders at one size."""
    noise = os.urandom(size)
    contenders: dict[str, dict[str, Callable[[], None]]] = {"snapshot": {}, "step of 1": {}, "step of 32": {}, "resume": {}}
    contenders["snapshot"]["file"] = lambda: write_atomically(folder / "reference", noise)
    contenders["resume"]["file"] = lambda: (folder / "reference").read_bytes() and None
    contenders["step of 1"]["file"] = contenders["step of 32"]["file"] = lambda: write_atomically(folder / "small", noise[:100])
    leases: list[tuple[BaseStore, Lease]] = []
    for kind, store in stores.items():
        lanes = [Lane(store, f"{size}-{i}", size) for i in range(LANES)]
        old, young = Lane(store, f"{size}-old", size), Lane(store, f"{size}-young", size)
        young.jump(YOUNG)
        old.jump(OLD)
        leases += [(store, lane.lease) for lane in (*lanes, old, young)]
        contenders["snapshot"][kind] = lambda store=store, lane=lanes[0]: commit(store, [lane.boundary()])  # type: ignore[misc]
        contenders["step of 1"][kind] = lambda store=store, lane=lanes[1]: commit(store, [lane.token()])  # type: ignore[misc]
        many = lanes[2:] + lanes[:2]
        contenders["step of 32"][kind] = lambda store=store, many=many: commit(store, [x.token() for x in many])  # type: ignore[misc]
        contenders["resume"][kind] = resume(store, young.lease.id)
        contenders["resume"][f"{kind}, {OLD:,} tokens"] = resume(store, old.lease.id)
    result: dict[str, Any] = {}
    for action, group in contenders.items():
        seconds = in_turns(group, rounds)
        for kind, values in seconds.items():
            milliseconds = ratio([0.001] * len(values), values)
            over = ratio(seconds["file"], values)
            result.setdefault(action, {})[kind] = {"ms": milliseconds, "over_file": over}
            print(f"{name:>7} {action:>10} {kind:>26}: {milliseconds} ms, {over} of the file", flush=True)
        if action == "resume":
            for kind in stores:
                flat = ratio(seconds[kind], seconds[f"{kind}, {OLD:,} tokens"])
                result.setdefault("resume over history", {})[kind] = flat
                print(f"{name:>7} resume with {OLD:,} tokens over {YOUNG:,}, {kind}: {flat}", flush=True)
    for store, lease in leases:
        store.release([lease])
        store.delete("t", lease.id)
    return result


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--sizes", nargs="*", choices=list(SIZES), default=list(SIZES))
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = LocalRedis(folder / "redis")
        stores: dict[str, BaseStore] = {
            "sqlite": SQLiteStore(folder / "sqlite" / "s.db"),
            "redis": RedisStore(server.url),
            "redis, blobs in a folder": RedisStore(server.url, prefix="folder", blobs=folder / "blobs"),
        }
        try:
            result = {size: measure(stores, folder, size, SIZES[size], chosen.rounds) for size in chosen.sizes}
        finally:
            for store in stores.values():
                store.close()
            server.kill()
    save("sessions", {"rounds": chosen.rounds, "lanes": LANES, "sizes": result})


if __name__ == "__main__":
    main()
