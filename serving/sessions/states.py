"""Between sessions and the model: the state that a session stands for, and the session that a text makes."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from lm.model.inspection import Inspection, inspect_memory
from lm.model.pretrained import Checkpoint
from lm.model.snapshot import SnapshotError, dump, load_snapshot
from lm.model.state import State
from serving.sessions.errors import DamagedError, InvalidError
from serving.sessions.store import RECENT, Content, Session, SessionStore, Settings

CHUNK_TOKENS = 8192
"""Ids read per call while a history is read again."""


def check_checkpoint(session: Session, checkpoint: Checkpoint) -> None:
    """InvalidError unless the session belongs to this checkpoint."""
    mine = checkpoint.identity
    if (session.settings.model, session.settings.tokenizer) != (mine.model, mine.tokenizer):
        raise InvalidError(
            f"session {session.id!r} belongs to model {session.settings.model} (tokenizer {session.settings.tokenizer}), the "
            f"checkpoint is {mine.model} ({mine.tokenizer}); give its own, or migrate it if its history was kept"
        )


def boundary_state(store: SessionStore, session: Session, checkpoint: Checkpoint) -> State:
    """The state at the session's boundary; its tail has still to be read."""
    check_checkpoint(session, checkpoint)
    data = store.snapshot(session)
    if data is None:
        return checkpoint.model.initial_state(1)
    try:
        return load_snapshot(checkpoint.model, data, checkpoint.identity)
    except SnapshotError as error:
        raise DamagedError(f"session {session.id!r}: {error}") from error


def inspect_session(store: SessionStore, session: Session, checkpoint: Checkpoint) -> Inspection:
    """A look into the session's memory, and what its last segment reads there."""
    if checkpoint.model.config.memory is None:
        raise InvalidError(f"session {session.id!r}: its model has no memory (memory: off), so there is nothing to draw")
    if not session.tail:
        raise InvalidError(f"session {session.id!r} has read nothing yet; give it some text first")
    return inspect_memory(checkpoint.model, boundary_state(store, session, checkpoint), session.tail)


@torch.inference_mode()
def read_again(
    checkpoint: Checkpoint, ids: Sequence[int], settings: Settings, advance: Callable[[int], None] = lambda _: None
) -> Content:
    """The session that reading `ids` from the start makes under this checkpoint; `advance(n)` is told of every n ids read."""
    model, segment, mine = checkpoint.model, checkpoint.model.config.segment, checkpoint.identity
    chosen = replace(settings, model=mine.model, tokenizer=mine.tokenizer, segment=segment)
    boundary = (len(ids) - 1) // segment * segment if ids else 0
    state = model.initial_state(1)
    step = max(1, CHUNK_TOKENS // segment) * segment
    for start in range(0, boundary, step):
        part = ids[start : min(start + step, boundary)]
        _, state = model(torch.tensor([list(part)], device=model.device), state, donate=True)
        advance(len(part))
    advance(len(ids) - boundary)
    snapshot = dump(model, state, 0, mine) if boundary else None
    kept = tuple(ids)
    history = kept if settings.keep_history else None
    return Content(chosen, boundary, snapshot, kept[max(0, boundary - RECENT) : boundary], kept[boundary:], history)


def translate(ids: Sequence[int], old: Checkpoint | None, new: Checkpoint) -> tuple[int, ...]:
    """Ids for the new checkpoint's tokenizer; `old` may be None where both have the same."""
    if old is None or old.tokenizer.fingerprint() == new.tokenizer.fingerprint():
        return tuple(ids)
    return (new.tokenizer.bos, *new.tokenizer.encode(old.tokenizer.decode(ids)))
