"""Tokenizers: lossless where they say so, cut after a newline without a trace, saved and loaded by content."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lm.data.pieces import PieceTokenizer
from lm.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from lm.data.words import WordTokenizer
from lm.errors import UserError

WIKI = " \n = Title = \n \n The cat sat on the mat , the cat . \n"
HARD = [
    "",
    " ",
    "\n\n \n",
    "  two  spaces\tand\r\ntabs ",
    "a\u2581b \u2581\u2581",
    "<s> </s> <unk> <0x0A> <bos>",
    "naïve café 戦場のヴァルキュリア 👩‍👩‍👧 \u0000 \u00a0 \u3000 \ufeff \u2028 \U0010ffff",
    "e\u0301 é ﬁ ① Å",
    "x" * 10_000,
]


@pytest.fixture(scope="session")
def words() -> WordTokenizer:
    return WordTokenizer.build([WIKI])


@pytest.mark.parametrize("text", HARD)
def test_bytes_and_pieces_give_back_every_hard_text(pieces: PieceTokenizer, text: str) -> None:
    for tokenizer in (ByteTokenizer(), pieces):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert tokenizer.decode_bytes([tokenizer.bos, *ids]) == text.encode()
        assert tokenizer.bos not in ids
        assert tokenizer.encode_bytes(text.encode()).tolist() == ids


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=80))
def test_pieces_give_back_any_text(pieces: PieceTokenizer, text: str) -> None:
    assert pieces.decode(pieces.encode(text)) == text


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_cutting_after_a_newline_changes_no_id(pieces: PieceTokenizer, moby_dick: str, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(moby_dick) - 2000))
    text = moby_dick[start : start + data.draw(st.integers(2, 2000))]
    cuts = [i + 1 for i, character in enumerate(text) if character == "\n"]
    if not cuts:
        return
    cut = data.draw(st.sampled_from(cuts))
    for tokenizer in (pieces, ByteTokenizer(), WordTokenizer.build([moby_dick[:20_000]])):
        assert tokenizer.encode(text[:cut]) + tokenizer.encode(text[cut:]) == tokenizer.encode(text)


def test_the_whole_bundled_text_survives_pieces_of_both_types(moby_dick: str) -> None:
    for model_type in ("unigram", "bpe"):
        tokenizer = PieceTokenizer.train([moby_dick[:100_000]], vocab_size=1000, model_type=model_type, threads=1)
        assert tokenizer.decode(tokenizer.encode(moby_dick)) == moby_dick
        assert tokenizer.vocab_size == 1000


def test_words_are_numbered_by_frequency_with_one_eos_per_line_and_bos_last(words: WordTokenizer) -> None:
    assert words.words[0] == "<eos>"
    assert words.vocab_size == len(set(WIKI.split()) | {"<eos>", "<unk>"}) + 1
    assert words.bos == words.vocab_size - 1
    ids = words.encode(WIKI)
    assert len(ids) == len(WIKI.split()) + 4
    assert words.decode(ids) == WIKI
    assert words.decode([words.bos, *words.encode(" the dog \n")]) == " the <unk> \n"
    assert words.encode(" dog \n")[0] == words.unknown
    assert words.encode("cat") == words.encode(" cat \n")


def test_a_prompt_leaves_its_last_line_open(words: WordTokenizer) -> None:
    first, second = words.words[0], words.words[1]
    line = words.encode(f"{first} {second}\n")
    assert words.encode_prompt(f"{first} {second}\n") == words.encode(f"{first} {second}") == line
    assert words.encode_prompt(f"{first} {second}") == line[:-1]
    assert words.encode_prompt("") == []


def test_ids_are_stored_in_the_smallest_type_that_holds_them(pieces: PieceTokenizer) -> None:
    assert ByteTokenizer().dtype == np.uint8
    assert pieces.dtype == np.uint16
    assert WordTokenizer(["<eos>", "<unk>", *map(str, range(65_534))]).dtype == np.uint16
    assert WordTokenizer(["<eos>", "<unk>", *map(str, range(65_535))]).dtype == np.uint32


def test_a_tokenizer_comes_back_from_its_folder_with_the_same_fingerprint(
    tmp_path: Path, pieces: PieceTokenizer, words: WordTokenizer
) -> None:
    for tokenizer in (ByteTokenizer(), pieces, words):
        tokenizer.save(tmp_path / tokenizer.kind)
        loaded = load_tokenizer(tmp_path / tokenizer.kind)
        assert type(loaded) is type(tokenizer)
        assert loaded.fingerprint() == tokenizer.fingerprint()
        assert loaded.encode(" the cat \n") == tokenizer.encode(" the cat \n")
    assert len({t.fingerprint() for t in (ByteTokenizer(), pieces, words)}) == 3


def test_a_fingerprint_covers_the_content_of_the_model_file() -> None:
    one, two = WordTokenizer(["<eos>", "<unk>", "a"]), WordTokenizer(["<eos>", "<unk>", "b"])
    assert one.fingerprint() != two.fingerprint()


def test_a_changed_or_missing_model_file_is_refused(tmp_path: Path, words: WordTokenizer) -> None:
    words.save(tmp_path)
    (tmp_path / "words.txt").write_text("<eos>\n<unk>\nother\n")
    with pytest.raises(UserError, match="the files beside it give"):
        load_tokenizer(tmp_path)
    WordTokenizer(["<eos>", "<unk>", "a"]).save(tmp_path)
    (tmp_path / "words.txt").write_text("a\n<unk>\nb\n")
    with pytest.raises(UserError, match="no <eos> in it"):
        load_tokenizer(tmp_path)
    (tmp_path / "words.txt").unlink()
    with pytest.raises(UserError, match=r"words\.txt: missing"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not a tokenizer description"),
        ("[]", "not a tokenizer description"),
        (json.dumps({"kind": "runes"}), "'runes' is unknown; known kinds: .*'bytes', 'pieces', 'words'"),
    ],
)
def test_a_tokenizer_that_is_none_is_refused(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(UserError, match=message):
        load_tokenizer(tmp_path)
    with pytest.raises(UserError, match=r"no tokenizer\.json there"):
        load_tokenizer(tmp_path / "nowhere")


def test_a_damaged_sentencepiece_model_is_refused(tmp_path: Path, pieces: PieceTokenizer) -> None:
    pieces.save(tmp_path)
    (tmp_path / "pieces.model").write_bytes(pieces.model[:1000])
    with pytest.raises(UserError, match=r"pieces\.model"):
        load_tokenizer(tmp_path)


def test_too_many_or_too_few_pieces_are_refused_with_what_is_possible() -> None:
    with pytest.raises(UserError, match=r"--vocab-size 32000: the training split is too small .* at most [0-9]+ here"):
        PieceTokenizer.train(["some words, some more words\n"] * 20, vocab_size=32_000, model_type="unigram")
    with pytest.raises(UserError, match="--vocab-size 10: too few pieces"):
        PieceTokenizer.train(["some words, some more words\n"] * 20, vocab_size=10, model_type="unigram")
    with pytest.raises(UserError, match="type 'char' is unknown; allowed: unigram, bpe"):
        PieceTokenizer.train(["x"], vocab_size=300, model_type="char")


def test_lines_with_tabs_and_very_long_lines_are_learned_from() -> None:
    text = "\t".join(["whalebone"] * 3000)
    tokenizer: Tokenizer = PieceTokenizer.train([text], vocab_size=280, model_type="bpe")
    assert len(tokenizer.encode("whalebone")) < len("whalebone")
