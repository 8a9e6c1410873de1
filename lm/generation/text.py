"""Ids to text as they come: never half a character, and stop strings found across the borders of tokens.

text = TextStream(tokenizer, stops=["\n\n"])
for token in ids:
    print(text.feed([token]), end="")
print(text.close())
"""

import codecs
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from lm.data.tokenizer import Tokenizer

_PIECES: WeakKeyDictionary[Tokenizer, dict[int, bytes]] = WeakKeyDictionary()
"""The bytes of single ids: one token at a time is how text is generated."""


class TextStream:
    """Turns ids to text piece by piece. Joined, the pieces are exactly what decoding all ids at once gives, up to the stop."""

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = (), before: Sequence[int] = ()) -> None:
        """`before`: ids that stand before the text; if they end inside a character, its rest completes it."""
        self._tokenizer = tokenizer
        self._pieces = _PIECES.setdefault(tokenizer, {})
        self._stops = [stop for stop in stops if stop]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(tokenizer.decode_bytes(before))
        self._held = ""
        self.stopped: str | None = None
        """The stop string that was found; what follows it is no longer part of the text."""

    def feed(self, ids: Sequence[int]) -> str:
        """The text that becomes certain with `ids`; "" once a stop string was found."""
        return self._take(self._decoder.decode(self._bytes(ids)), final=False)

    def close(self) -> str:
        """What was held back: the start of a stop string that did not come, or of a character that was not completed."""
        return self._take(self._decoder.decode(b"", final=True), final=True)

    def _bytes(self, ids: Sequence[int]) -> bytes:
        if len(ids) != 1:
            return self._tokenizer.decode_bytes(ids)
        piece = self._pieces.get(ids[0])
        if piece is None:
            piece = self._pieces[ids[0]] = self._tokenizer.decode_bytes(ids)
        return piece

    def _take(self, new: str, final: bool) -> str:
        if self.stopped is not None:
            return ""
        if not self._stops:
            return new
        text = self._held + new
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            # the one that is complete first, as reading character by character would find it; of these the longest
            at, self.stopped = min(found, key=lambda item: (item[0] + len(item[1]), item[0]))
            self._held = ""
            return text[:at]
        keep = 0 if final else max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest beginning of `stop` that `text` ends with."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
