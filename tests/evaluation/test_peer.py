"""Hugging Face models under the same protocol: sliding windows that predict every token once."""

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lm.data.tokenizer import ByteTokenizer
from lm.evaluation.peer import load_peer, windows
from tests.conftest import Pmi

transformers = pytest.importorskip("transformers")


@given(st.integers(1, 300), st.integers(2, 40), st.integers(1, 40))
def test_windows_predict_every_token_once_with_all_the_context_there_is(length: int, context: int, stride: int) -> None:
    stride = min(stride, context)
    found = windows(length, context, stride)
    assert [i for _, at, end in found for i in range(at, end)] == list(range(length))
    for first, at, end in found:
        assert 0 <= first <= at < end
        assert end - first <= context
        assert first == 0 or end - first == context


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=257, n_positions=32, n_embd=16, n_layer=2, n_head=2, bos_token_id=256, eos_token_id=256
    )
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    ByteTokenizer().save(folder)
    return folder


def test_a_peer_is_measured_on_the_same_documents_with_the_same_report(pmi: Pmi, gpt2: Path, books: Path) -> None:
    call = ("eval-peer", "--model", gpt2, "--data", books, "--context", 32, "--json")
    code, out, err = pmi(*call, "--stride", 8)
    assert code == 0, err
    result = json.loads(out)
    found = result["passes"]["none, stride 8"]
    assert found["tokens"] == sum(path.stat().st_size for path in books.iterdir())
    # the plainest way: each token behind as many tokens as its window leaves
    model, nats = load_peer(gpt2, torch.device("cpu")).model, 0.0
    for path in sorted(books.iterdir()):
        tokens = [256, *path.read_bytes()]
        for first, at, end in windows(len(tokens) - 1, 32, 8):
            logits = model(torch.tensor([tokens[first:end]])).logits[0].detach().log_softmax(-1)
            nats -= sum(float(logits[i - first, tokens[i + 1]]) for i in range(at, end))
    assert found["nats"] == pytest.approx(nats, rel=1e-5)
    assert "context 32, stride 8" in result["protocol"]["modes"]["none, stride 8"]
    code, out, err = pmi(*call, "--documents", " book0, book5.txt ,")
    assert code == 0, err
    assert json.loads(out)["protocol"]["documents"] == 2
    code, out, err = pmi(*call, "--documents", "book2")
    (note,) = [line for line in json.loads(out)["notes"] if "interval" in line]
    assert "no longer than a segment of 32" in note
    code, _, err = pmi(*call, "--documents", ",")
    assert (code, "names none" in err) == (2, True)
    code, _, err = pmi(*call, "--stride", 33)
    assert (code, "--stride 33: must be 1 to the context, 32" in err) == (2, True)
    code, _, err = pmi("eval-peer", "--model", books, "--data", books)
    assert (code, "no config.json there" in err) == (2, True)


def test_a_peer_with_a_tokenizer_of_its_own_reads_the_same_text_and_is_divided_by_the_same_bytes(
    pmi: Pmi, books: Path, moby_dick: str, tmp_path: Path
) -> None:
    from tokenizers import ByteLevelBPETokenizer

    pieces = ByteLevelBPETokenizer()
    pieces.train_from_iterator([moby_dick[:20_000]], vocab_size=400, special_tokens=["<s>"], show_progress=False)
    transformers.PreTrainedTokenizerFast(tokenizer_object=pieces._tokenizer, bos_token="<s>").save_pretrained(tmp_path)
    config = transformers.GPT2Config(vocab_size=400, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    code, out, err = pmi("eval-peer", "--model", tmp_path, "--data", books, "--json")
    assert code == 0, err
    (found,) = json.loads(out)["passes"].values()
    texts = [path.read_text() for path in sorted(books.iterdir())]
    assert found["tokens"] == sum(len(pieces.encode(text).ids) for text in texts) < sum(map(len, texts))
    assert found["bits_per_byte"] == pytest.approx(found["nats"] / sum(map(len, texts)) / math.log(2))
    assert found["word_perplexity"] == pytest.approx(math.exp(found["nats"] / sum(len(text.split()) for text in texts)))
