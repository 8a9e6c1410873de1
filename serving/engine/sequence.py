"""One request on its way through the engine."""

import time
from collections.abc import Sequence as Ids

from torch import Tensor

from lm.generation.sampling import Batch
from lm.generation.text import TextStream
from lm.model import State
from lm.model.snapshot import Captured
from serving.engine.request import FinishReason, Request
from serving.engine.stream import Stream
from serving.sessions.store import Lease


class Sequence:
    """What the loop knows of one request. Waiting, then reading its prompt in a state of its own, then in a lane of the slab."""

    def __init__(self, request: Request, stream: Stream) -> None:
        self.request, self.stream = request, stream
        self.deadline = None if request.deadline is None else time.monotonic() + request.deadline
        self.opening = False
        """A helper is taking its session from the store."""
        self.held = False
        """The journal knows it: its end passes through there."""
        self.finish: FinishReason | None = None
        """Its end was decided; nothing more is generated."""
        self.lease: Lease | None = None
        self.position = 0
        """Ids that the state has read."""
        self.unread: Ids[int] = ()
        """Ids to read before the first token: tail and prompt."""
        self.cursor = 0
        """How many of these were read."""
        self.unwritten: list[int] = []
        """Ids behind the journal: the prompt's, until its first snapshot or token."""
        self.journalled = 0
        """Position of the first of these."""
        self.produced = 0
        self.turn = request.turn
        """Its first ids in the journal start a turn."""
        self.snapshot: Captured | None = None
        """Taken, but not yet in the journal."""
        self.state: State | None = None
        self.settings: Batch | None = None
        self.recent: Tensor | None = None
        self.text: TextStream | None = None
        self.lane: int | None = None

    @property
    def durable(self) -> bool:
        """Whether its tokens pass through the journal."""
        return self.request.session is not None or self.request.response is not None

    @property
    def end(self) -> int:
        """Position behind the prompt."""
        return self.position - self.cursor + len(self.unread)
