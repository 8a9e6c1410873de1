"""The word tokenizer of WikiText: the types of a training text by frequency, `<eos>` for each line's end, `<unk>`.

Built by `pmi data prepare wikitext103 ...`; saved as `tokenizer.json` + `words.txt` (one word per line, in id order).
"""

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from lm.data.tokenizer import Tokenizer, read_model_file
from lm.errors import UserError

FILE = "words.txt"
EOS = "<eos>"
UNK = "<unk>"


class WordTokenizer(Tokenizer):
    """One id per whitespace-separated word and one `<eos>` per line; words outside the vocabulary become `<unk>`.

    Ids go by falling frequency, as adaptive softmax wants; BOS is the last id. WikiText's lines (a space before every
    word, a space before the newline) decode to themselves, up to `<unk>`.
    """

    kind = "words"
    lossless = False

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.bos = len(self.words)
        self.vocab_size = len(self.words) + 1
        self._ids = {word: i for i, word in enumerate(self.words)}
        self._eos = self._ids[EOS]
        self.unknown = self._ids[UNK]
        self._bytes = [b" " + word.encode() for word in self.words] + [b""]
        self._bytes[self._eos] = b" \n"

    @classmethod
    def build(cls, texts: Iterable[str]) -> "WordTokenizer":
        """The vocabulary of `texts`: every type, most frequent first, ties in order of first appearance."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.split())
            counts[EOS] += text.count("\n") + (not text.endswith("\n"))
        counts.setdefault(UNK, 0)
        return cls([word for word, _ in counts.most_common()])

    def encode(self, text: str) -> list[int]:
        lines = text.split("\n")
        if not lines[-1]:  # the text ends with a newline (or is empty): no line begins after it
            lines.pop()
        get, unknown, eos = self._ids.get, self._ids[UNK], self._eos
        ids: list[int] = []
        for line in lines:
            ids += [get(word, unknown) for word in line.split()]
            ids.append(eos)
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        ids = self.encode(text)
        return ids if not text or text.endswith("\n") else ids[:-1]

    def decode_bytes(self, ids: Sequence[int]) -> bytes:
        table = self._bytes
        return b"".join([table[i] for i in ids])

    def files(self) -> dict[str, bytes]:
        return {FILE: "".join(f"{word}\n" for word in self.words).encode()}

    def description(self) -> dict[str, Any]:
        return super().description() | {"sha256": hashlib.sha256(self.files()[FILE]).hexdigest()}

    @classmethod
    def restore(cls, description: dict[str, Any], folder: Path) -> "WordTokenizer":
        words = read_model_file(folder, FILE).decode("utf-8", errors="replace").split("\n")[:-1]
        if missing := [word for word in (EOS, UNK) if word not in words]:
            raise UserError(f"{folder / FILE}: no {' and no '.join(missing)} in it; restore the folder")
        return cls(words)
