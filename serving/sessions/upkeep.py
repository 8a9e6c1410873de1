"""The scrub: everything in a store, read and compared with its checksums and counts."""

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

from serving.sessions.errors import DamagedError, StoreError
from serving.sessions.reading import Reader
from serving.sessions.records import named_snapshots
from serving.sessions.responses import decode_response

NAMED = 3
"""Sessions that are named beside a damaged snapshot."""


def examine(store: Reader) -> Iterator[tuple[str, str]]:
    """What is wrong: (where, what). A store that is written to meanwhile may look wrong for a moment."""
    yield from store.examine()
    wanted: Counter[str] = Counter()
    users: dict[str, list[str]] = {}
    for raw in store.scan(None, None):
        where = f"session {raw.tenant}/{raw.id}"
        with suppress(DamagedError):  # of which `record` tells below
            for hash_, count in named_snapshots(raw.bounds).items():
                wanted[hash_] += count
                if len(named := users.setdefault(hash_, [])) < NAMED:
                    named.append(f"{raw.tenant}/{raw.id}")
        try:
            record = raw.record()
            if record.settings.keep_history and len(store.read_whole_history(raw.tenant, raw.id)) != 4 * record.boundary:
                yield where, "its history is not as long as its boundary says"
        except StoreError as error:
            yield where, str(error)
    counted = dict(store.blobs())
    for hash_ in wanted.keys() | counted.keys():
        where, named = f"snapshot {hash_[:16]}", users.get(hash_, [])
        referring = f"; referred to by {', '.join(named)}{', ...' if len(named) == NAMED else ''}" if named else ""
        if hash_ not in counted:
            yield where, f"is not in the store{referring}"
            continue
        if wanted[hash_] != counted[hash_]:
            wrong = f"counted {counted[hash_]} times, referred to {wanted[hash_]} times"
            yield f"{where} (count)", f"{wrong}; `pmi sessions verify --repair` counts anew"
        try:
            store.read_checked(hash_, where)
        except StoreError as error:
            yield where, f"{error}{referring}"
    for tenant, id in store.all_responses():
        try:
            row = store.load_response(tenant, id)
            if row is not None:
                decode_response(tenant, id, row)
        except StoreError as error:
            yield f"response {tenant}/{id}", str(error)


def references(store: Reader) -> tuple[Counter[str], bool]:
    """How often sessions refer to each snapshot; and whether there are some of which that cannot be known."""
    counts: Counter[str] = Counter()
    unknown = False
    for raw in store.scan(None, None):
        try:
            counts.update(named_snapshots(raw.bounds))
        except DamagedError:
            unknown = True
    return counts, unknown
