"""From a request to a sequence that can be read: a new text, or a session taken from the store under a lease."""

import torch

from lm.generation.sampling import RECENT, Batch, last_ids
from lm.generation.text import TextStream
from lm.model.pretrained import Checkpoint
from lm.model.snapshot import SnapshotError, load_snapshot
from serving.engine.request import CHOICE_STREAM, Usage
from serving.engine.sequence import Sequence
from serving.sessions.errors import ConflictError, InvalidError
from serving.sessions.store import Session, SessionStore


@torch.inference_mode()
def open_new(checkpoint: Checkpoint, sequence: Sequence) -> None:
    """Prepare a sequence without a session: BOS, then the prompt."""
    sequence.state = checkpoint.model.initial_state(1)
    _prepare(checkpoint, sequence, (), (), 0, sequence.request.sampling.stream)


@torch.inference_mode()
def open_session(checkpoint: Checkpoint, store: SessionStore, owner: str, seconds: float, sequence: Sequence) -> None:
    """Take the request's session from the store: lease it, load its snapshot, line up its tail and the prompt."""
    request = sequence.request
    assert request.session is not None
    lease = store.lease(request.tenant, request.session, owner, seconds)
    try:
        session = store.get(request.tenant, request.session)
        _check(checkpoint, session)
        if request.expected_version not in (None, session.version):
            raise ConflictError(
                f"session {session.id!r}: version {request.expected_version} was expected, it is at {session.version}; "
                "read it again",
                session.version,
            )
        data = store.snapshot(session)
        try:
            mine = checkpoint.identity
            if data is None:
                sequence.state = checkpoint.model.initial_state(1)
            else:
                sequence.state = load_snapshot(checkpoint.model, data, mine, verified=True)
        except SnapshotError as error:
            # the store has compared the hash: these are the bytes that were stored, by an engine of another kind
            raise InvalidError(
                f"session {session.id!r}: {error}; serve it with the `engine.dtype` that it was made with"
            ) from error
        sequence.position = session.boundary
        _prepare(checkpoint, sequence, session.recent, session.tail, session.position, session.stream)
    except BaseException:
        store.release([lease])
        raise
    sequence.lease = lease


def _check(checkpoint: Checkpoint, session: Session) -> None:
    mine = checkpoint.identity
    for name, theirs, ours in (
        ("model", session.settings.model, mine.model),
        ("tokenizer", session.settings.tokenizer, mine.tokenizer),
    ):
        if theirs != ours:
            raise InvalidError(
                f"session {session.id!r} belongs to {name} {theirs}, this checkpoint's is {ours}; "
                "use the checkpoint it was made with, or `pmi sessions migrate`"
            )


def _prepare(
    checkpoint: Checkpoint, sequence: Sequence, before: tuple[int, ...], tail: tuple[int, ...], position: int, stream: int
) -> None:
    """`before`, `tail`: the last ids before the state and those behind it; `position`: of the first new id."""
    request, tokenizer = sequence.request, checkpoint.tokenizer
    prompt = [*([] if position else [tokenizer.bos]), *request.prompt]
    known = [*before, *tail, *prompt[-RECENT:]]
    sequence.unread = [*tail, *prompt]
    sequence.unwritten, sequence.journalled = prompt, position
    sampling = request.sampling.replace(stream=stream + CHOICE_STREAM * request.choice)
    device = checkpoint.model.device
    sequence.settings = Batch.of([sampling], device)
    sequence.recent = last_ids(known, position + len(prompt), device)[None]
    if request.text:
        own = len(request.continued)
        sequence.text = TextStream(tokenizer, request.stop, known[max(0, len(known) - own - RECENT) : len(known) - own])
        sequence.text.feed(request.continued)
    sequence.stream.usage = Usage(position, len(prompt), 0, len(tail), 0, sampling.seed, sampling.stream)
