"""The scrub: everything in a store, read and compared with its checksums and counts."""

from collections.abc import Iterator

from serving.sessions.errors import StoreError
from serving.sessions.reading import Reader
from serving.sessions.responses import decode_response


def examine(store: Reader) -> Iterator[tuple[str, str]]:
    """What is wrong: (where, what). A store that is written to meanwhile may look wrong for a moment."""
    yield from store.examine()
    wanted: dict[str, int] = {}
    for raw in store.scan(None, None):
        where = f"session {raw.tenant}/{raw.id}"
        try:
            record = raw.record()
            for hash_, count in record.snapshots().items():
                wanted[hash_] = wanted.get(hash_, 0) + count
            if record.settings.keep_history and len(store.read_whole_history(raw.tenant, raw.id)) != 4 * record.boundary:
                yield where, "its history is not as long as its boundary says"
        except StoreError as error:
            yield where, str(error)
    counted = dict(store.blobs())
    for hash_ in wanted.keys() | counted.keys():
        where = f"snapshot {hash_[:16]}"
        if wanted.get(hash_, 0) != counted.get(hash_, 0):
            yield f"{where} (count)", f"counted {counted.get(hash_, 0)} times, referred to {wanted.get(hash_, 0)} times"
        if hash_ in counted:
            try:
                store.read_checked(hash_, where)
            except StoreError as error:
                yield where, str(error)
    for tenant, id in store.all_responses():
        try:
            row = store.load_response(tenant, id)
            if row is not None:
                decode_response(tenant, id, row)
        except StoreError as error:
            yield f"response {tenant}/{id}", str(error)
