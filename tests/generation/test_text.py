"""Ids to text: whole characters only, exact when joined, stop strings wherever the tokens end."""

from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.pieces import PieceTokenizer
from lm.data.tokenizer import ByteTokenizer, Tokenizer
from lm.data.words import EOS, UNK, WordTokenizer
from lm.generation.text import TextStream

TOKENIZER = ByteTokenizer()
real_text = st.text(st.sampled_from("ab\n é漢😀"), max_size=40)


def cut(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted(c % (len(ids) + 1) for c in cuts), len(ids)]
    return [ids[a:b] for a, b in pairwise(edges)]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """Of each kind one; the pieces fall back to single bytes for characters that they have not seen."""
    if kind == "pieces":
        text = (Path(__file__).parent.parent.parent / "lm/data/text/moby-dick.txt").read_text("utf-8")
        return PieceTokenizer.train([text[:100_000]], vocab_size=700, model_type="unigram", threads=1)
    return ByteTokenizer() if kind == "bytes" else WordTokenizer(["the", "whale", "é漢", "😀", EOS, UNK])


@pytest.mark.parametrize("kind", ["bytes", "pieces", "words"])
@settings(deadline=None)
@given(st.data(), st.lists(st.integers(0, 100), max_size=8))
def test_pieces_join_to_the_text_of_decoding_at_once_even_for_broken_bytes(
    kind: str, data: st.DataObject, cuts: list[int]
) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=60))
    stream = TextStream(tokenizer)
    pieces = [stream.feed(part) for part in cut(ids, cuts)]
    assert "".join([*pieces, stream.close()]) == tokenizer.decode(ids)


@given(real_text)
def test_no_piece_holds_half_a_character(text: str) -> None:
    stream = TextStream(TOKENIZER)
    pieces = [stream.feed([i]) for i in TOKENIZER.encode(text)]
    assert "\ufffd" not in "".join(pieces)
    assert "".join(pieces) == text
    assert stream.close() == ""


@given(real_text, st.integers(0, 8))
def test_a_character_begun_before_is_completed(text: str, split: int) -> None:
    ids = TOKENIZER.encode("漢😀" + text)
    stream = TextStream(TOKENIZER, before=ids[:split])
    produced = "".join([stream.feed([i]) for i in ids[split:]]) + stream.close()
    whole = TOKENIZER.decode(ids)
    assert whole.endswith(produced)
    assert "\ufffd" not in produced


@settings(max_examples=200)
@given(real_text, st.lists(st.text("ab\n é", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(st.integers(0, 100)))
def test_text_ends_before_the_first_stop_string_however_tokens_are_cut(text: str, stops: list[str], cuts: list[int]) -> None:
    stream = TextStream(TOKENIZER, stops)
    found = ""
    for part in cut(TOKENIZER.encode(text), cuts):
        found += stream.feed(part)
        assert stream.stopped is not None or text.startswith(found)
    found += stream.close()
    # by the book: the shortest beginning of the text that ends with a stop string
    ends = [n for n in range(len(text) + 1) if any(text[:n].endswith(stop) for stop in stops)]
    if not ends:
        assert (found, stream.stopped) == (text, None)
        return
    longest = max((stop for stop in stops if text[: ends[0]].endswith(stop)), key=len)
    assert (found, stream.stopped) == (text[: ends[0] - len(longest)], longest)
