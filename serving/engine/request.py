"""What is asked of the engine and what it answers with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from lm.generation.sampling import Sampling

FinishReason = Literal["length", "stop", "cancelled", "deadline"]
CHOICE_STREAM = 2**48
"""Distance of the random streams of a request's choices: far beyond the numbers that a store gives to sessions."""


@dataclass(frozen=True)
class Request:
    """One text to read and continue."""

    prompt: Sequence[int] = ()
    """Ids to read first; BOS is put before the first one of a new text. With a session and no prompt, its text goes on."""
    tokens: int = 256
    """Most tokens to generate; 0 only reads the prompt into the session."""
    sampling: Sampling = field(default_factory=Sampling)
    """With a session, `stream` is the session's own."""
    choice: int = 0
    """Which of n choices: each has its own random stream."""
    stop: tuple[str, ...] = ()
    """Strings that end the text; the ids that spell them stay in the session."""
    text: bool = True
    """Whether events carry text besides ids (needed for `stop`)."""
    logprobs: int | None = None
    """Log-probabilities of the chosen ids and of so many of the likeliest (None: not computed)."""
    tenant: str = "local"
    """Waiting requests are admitted in turns of tenants."""
    session: str | None = None
    """Name of the session in the store that is read and written; None: nothing is kept."""
    response: str | None = None
    """Id of a response in the store that the ids are recorded in."""
    turn: bool = True
    """Whether the prompt starts a turn, which can be taken back; false where an interrupted one goes on."""
    continued: Sequence[int] = ()
    """Ids that the response has already, where an interrupted one goes on."""
    expected_version: int | None = None
    """Of the session: if it is at another one, nothing is read (ConflictError)."""
    deadline: float | None = None
    """Seconds from now on after which generation ends with what there is."""

    def problems(self, vocabulary: int, durable: bool) -> Iterator[str]:
        """What is wrong with it, for an engine of so many ids, with a session store or without."""
        yield from self.sampling.problems()
        if self.prompt:
            low, high = min(self.prompt), max(self.prompt)
            if low < 0 or high >= vocabulary:
                yield f"prompt: token id {low if low < 0 else high} is out of range 0..{vocabulary - 1}"
        if self.tokens < 0 or (self.tokens == 0 and self.session is None):
            yield f"tokens: {self.tokens} must be 1 or more (0 only to read a prompt into a session)"
        if self.stop and not self.text:
            yield "stop: needs text=True"
        if self.logprobs is not None and not 0 <= self.logprobs <= 1000:
            yield f"logprobs: {self.logprobs} must be 0..1000"
        if not durable and (self.session is not None or self.response is not None):
            yield "session: this engine has no session store; give it one"


class Logprobs(NamedTuple):
    """Of one generated token: its own, and the likeliest ids with theirs."""

    own: float
    likeliest: tuple[tuple[int, float], ...]


class Event(NamedTuple):
    """Some generated tokens; the last event of a stream says why it ended."""

    position: int
    """Of the first id in the text."""
    ids: tuple[int, ...] = ()
    text: str = ""
    """What has become certain with these ids: never half a character, never part of a stop string."""
    logprobs: tuple[Logprobs, ...] = ()
    finish: FinishReason | None = None

    def then(self, later: "Event") -> "Event":
        """Both as one."""
        return Event(
            self.position, self.ids + later.ids, self.text + later.text, self.logprobs + later.logprobs, later.finish
        )  # fmt: skip


@dataclass
class Usage:
    """What a sequence has cost so far, and what made its tokens."""

    start: int = 0
    """Position of its prompt's first id."""
    prompt: int = 0
    """Ids of the prompt, BOS included where it was put before."""
    read: int = 0
    """Of these, read by the model so far."""
    replayed: int = 0
    """Ids of the session's tail that were read again: at most a segment."""
    generated: int = 0
    seed: int = 0
    stream: int = 0
    version: int = 0
    """Of the session, with the tokens handed out so far."""
