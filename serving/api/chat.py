"""Chat messages to text, and which of the messages a client sends are new to the session.

A session keeps no messages, so it cannot compare them. The newest response of the session keeps a count and a chained digest of
those before its answer; the answer itself it has as ids. A resent history is recognised by these.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

from serving.api.errors import ApiError
from serving.api.schemas import Message
from serving.config import ChatTemplate

Pair = tuple[str, str]
"""Role and text."""


@dataclass(frozen=True)
class Past:
    """What is known of a session's messages: `count` messages with this digest, then the model's answer."""

    count: int = 0
    digest: str = ""
    answer: str | None = None
    stopped: str | None = None
    """The stop string that the answer ended with, which the session has read."""


@dataclass(frozen=True)
class Delta:
    """What is new: its text, and the messages that the session will have before the next answer."""

    text: str
    count: int
    digest: str


def chained(digest: str, messages: Sequence[Pair]) -> str:
    """The digest of messages behind those of `digest`."""
    for role, text in messages:
        digest = hashlib.sha256(f"{digest}\0{role}\0{text}".encode()).hexdigest()
    return digest


def recognise(template: ChatTemplate, messages: Sequence[Message], past: Past, fresh: bool) -> Delta:
    """The new messages as text. `fresh`: the session has read nothing yet. ApiError 409 if they do not fit its past."""
    pairs = [(message.role, message.text) for message in messages]
    held = past.count + (past.answer is not None)
    digest = past.digest if past.answer is None else chained(past.digest, [("assistant", past.answer)])
    if not fresh:
        known = pairs[:held]
        if held and len(known) == held and chained("", known) == digest:
            pairs = pairs[held:]
            if not pairs:
                raise ApiError(409, "nothing_new", f"all {held} messages are in the session already; add a new one", "messages")
        elif any(role == "assistant" for role, _ in pairs):
            raise ApiError(
                409, "history_mismatch",
                f"the messages hold answers of the assistant, but their beginning is not the {held} messages that this session "
                "is known to have; send only the new messages, or all of them unchanged, or roll the session back",
                "messages",
            )  # fmt: skip
        elif pairs[0][0] in ("system", "developer"):
            raise ApiError(
                409, "history_mismatch",
                f"the messages begin with one of the {pairs[0][0]}, as a whole conversation does, but they are not the {held} "
                "messages that this session is known to have; send only the new messages, or all of them with the answers",
                "messages",
            )  # fmt: skip
    text = "".join(template.message.replace("{role}", role).replace("{content}", content) for role, content in pairs)
    text += template.answer
    if past.answer is not None:
        text = template.end + text
        if past.stopped is not None and text.startswith(past.stopped):
            text = text.removeprefix(past.stopped)  # the model has begun the next message itself
    return Delta(text, held + len(pairs), chained(digest, pairs))
