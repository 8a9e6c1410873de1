"""What one turn is going to do, as a value that is stored with its response: enough for any replica to go on with it.

A turn starts at position `turn` of its session, reads the prompt (BOS before it at position 0), and generates from `start` on.
`continuation` says what is left to do, from what the store holds and nothing else.
"""

import base64
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from lm.data.tokenizer import Tokenizer
from lm.generation.sampling import Sampling
from lm.generation.text import TextStream
from serving.engine import Request
from serving.sessions.store import Response, Session

CONTEXT = 16
"""Ids before a response that are kept, for a character that it may complete."""


@dataclass(frozen=True)
class Plan:
    """One turn, or one stateless request."""

    kind: str
    """completion, chat or append."""
    model: str
    """Fingerprint."""
    prompt: tuple[int, ...]
    tokens: int
    sampling: Sampling
    stop: tuple[str, ...] = ()
    before: tuple[int, ...] = ()
    """The last ids before the first generated one."""
    turn: int = 0
    """Position at which the turn starts."""
    version: int = 0
    """Version of the session then."""
    stream: int = 0
    """Number of the session's random stream then: a rollback in between gives it another."""
    chat: Mapping[str, Any] = field(default_factory=dict)
    """Of a chat: count and digest of the messages up to the answer."""

    @property
    def start(self) -> int:
        """Position of the first generated id."""
        return self.turn + (self.turn == 0) + len(self.prompt)

    def parameters(self) -> dict[str, Any]:
        """As JSON values."""
        packed = base64.b64encode(struct.pack(f"<{len(self.prompt)}i", *self.prompt)).decode()
        # not asdict of the whole: it would copy a prompt of a million ids one by one
        plain = {part.name: getattr(self, part.name) for part in fields(self)}
        return {**plain, "prompt": packed, "sampling": asdict(self.sampling), "chat": dict(self.chat)}

    @classmethod
    def of(cls, response: Response) -> "Plan":
        """The plan stored with a response."""
        values = dict(response.parameters)
        data = base64.b64decode(values["prompt"])
        values["prompt"] = struct.unpack(f"<{len(data) // 4}i", data)
        values |= {"sampling": Sampling(**values["sampling"])}
        return cls(**{**values, "stop": tuple(values["stop"]), "before": tuple(values["before"])})

    def request(self, tenant: str, session: str | None, response: str | None) -> Request:
        """The whole of it."""
        return Request(
            self.prompt, self.tokens, self.sampling, stop=self.stop, tenant=tenant, session=session, response=response,
            expected_version=self.version if session is not None else None,
        )  # fmt: skip


def place(plan: Plan, session: Session) -> Plan:
    """The plan, starting where a session stands."""
    known = (*session.recent, *session.tail, *plan.prompt)[-CONTEXT:]
    return replace(plan, before=known, turn=session.position, version=session.version, stream=session.stream)


def continuation(response: Response, session: Session | None) -> Request | None:
    """What is left of a response that is not done; None where its session has moved on, so that it cannot go on."""
    plan, ids = Plan.of(response), response.ids
    whole = plan.request(response.tenant, response.session, response.id)
    left = plan.tokens - len(ids)
    if session is None:
        return None if response.session is not None else replace(whole, prompt=(*plan.prompt, *ids), tokens=left, continued=ids)
    if session.stream != plan.stream:
        return None
    if session.version == plan.version and not ids:
        return whole
    if session.turn != plan.turn or (not ids and not _read(session, plan)):
        return None
    rest = replace(whole, expected_version=session.version, turn=False)
    if session.position == plan.start + len(ids):
        return replace(rest, prompt=(), tokens=left, continued=ids)
    if plan.turn < session.position < plan.start and not ids:
        return replace(rest, prompt=plan.prompt[session.position - plan.turn - (plan.turn == 0) :])
    return None


def _read(session: Session, plan: Plan) -> bool:
    """Whether what the session has read since the turn's start is of this turn's prompt: another may have started there too."""
    applied = plan.prompt[: max(0, session.position - plan.turn - (plan.turn == 0))]
    known = (*session.recent, *session.tail)
    count = min(len(applied), len(known))
    return known[len(known) - count :] == applied[len(applied) - count :]


class Text:
    """The text of a response's ids, wherever it is taken up."""

    def __init__(self, tokenizer: Tokenizer, plan: Plan, ids: Sequence[int] = ()) -> None:
        self.stream = TextStream(tokenizer, plan.stop, plan.before)
        self.stream.feed(ids)

    def feed(self, ids: Sequence[int], last: bool) -> str:
        """The text that these ids add; of the last ones, also what was held back."""
        return self.stream.feed(ids) + (self.stream.close() if last else "")


def answer(tokenizer: Tokenizer, response: Response) -> tuple[str, str | None]:
    """The text of a response as far as it is, and the stop string that ended it."""
    text = Text(tokenizer, Plan.of(response))
    return text.feed(response.ids, True), text.stream.stopped
