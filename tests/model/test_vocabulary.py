"""Tied embedding and softmax, plain and adaptive."""

import pytest
import torch
import torch.nn.functional as F

from lm.config import ModelConfig, load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.generation.stream import stream
from lm.model import PMI
from lm.model.pretrained import Checkpoint
from lm.model.vocabulary import Embedding, Head

torch.manual_seed(0)


def vocabulary(cutoffs: list[int], divide: int = 1, size: int = 50) -> tuple[Embedding, Head]:
    config = ModelConfig(
        vocab_size=size, layers=1, width=16, heads=2, feedforward=8, segment=4, window=4, cutoffs=cutoffs, cluster_divide=divide
    )
    embedding = Embedding(config)
    return embedding, Head(embedding)


CASES = [([], 1), ([10], 1), ([10, 20, 40], 1), ([10, 20, 40], 2), ([1, 49], 4)]


@pytest.mark.parametrize(("cutoffs", "divide"), CASES)
def test_probabilities_sum_to_one_and_the_loss_is_the_log_probability_of_the_target(cutoffs: list[int], divide: int) -> None:
    _, head = vocabulary(cutoffs, divide)
    hidden, targets = torch.randn(3, 50, 16) * 3, torch.arange(50).expand(3, 50)
    log_probabilities = head.logits(hidden).log_softmax(-1)
    torch.testing.assert_close(log_probabilities.exp().sum(-1), torch.ones(3, 50), rtol=1e-5, atol=1e-5)
    expected = -log_probabilities.gather(-1, targets[..., None]).squeeze(-1)
    torch.testing.assert_close(head.nll(hidden, targets), expected, rtol=1e-4, atol=1e-4)
    mask = torch.rand(3, 50) < 0.5
    torch.testing.assert_close(head.loss(hidden, targets, mask), expected[mask].sum(), rtol=1e-4, atol=1e-3)
    if cutoffs:  # with several clusters the scores are log-probabilities already
        torch.testing.assert_close(head.logits(hidden), log_probabilities, rtol=1e-4, atol=1e-4)


def test_one_cluster_is_the_plain_softmax() -> None:
    embedding, head = vocabulary([])
    hidden, targets = torch.randn(7, 16), torch.randint(0, 50, (7,))
    plain = F.cross_entropy(hidden @ embedding.table_0.T, targets, reduction="sum")
    torch.testing.assert_close(head.loss(hidden, targets), plain)
    assert torch.equal(embedding(targets), F.embedding(targets, embedding.table_0))


@pytest.mark.parametrize(("cutoffs", "divide"), CASES)
def test_embedding_and_output_share_storage(cutoffs: list[int], divide: int) -> None:
    embedding, head = vocabulary(cutoffs, divide)
    for name, parameter in embedding.named_parameters():
        assert getattr(head, name).data_ptr() == parameter.data_ptr()
    assert embedding(torch.arange(50)).shape == (50, 16)


@pytest.mark.parametrize(("cutoffs", "divide"), CASES)
def test_an_embedding_does_not_depend_on_its_company_to_the_bit(cutoffs: list[int], divide: int) -> None:
    embedding, _ = vocabulary(cutoffs, divide)
    tokens = torch.randint(0, 50, (16, 2))  # few: rounding follows the number of rows only where it is small
    alone = embedding(tokens)[:, 0]
    for cluster in range(embedding.clusters):  # company that fills one cluster after the other
        tokens[:, 1] = embedding.edges[cluster]
        assert torch.equal(embedding(tokens)[:, 0], alone)


def test_the_loss_of_267_735_words_never_builds_all_logits() -> None:
    config = load_model_config("wikitext103")
    embedding = Embedding(config.model_copy(update={"width": 8}))
    head = Head(embedding)
    rows: list[int] = []
    scores = head._scores

    def counted(hidden: torch.Tensor, cluster: int) -> torch.Tensor:
        result = scores(hidden, cluster)
        rows.append(result.numel())
        return result

    head._scores = counted  # type: ignore[method-assign]
    frequent = torch.randint(0, 20_000, (64,))
    frequent[0] = 267_000
    head.loss(torch.randn(64, 8), frequent).backward()
    assert sum(rows) < 64 * 267_735 / 10


def test_generation_works_with_an_adaptive_softmax() -> None:
    model = PMI(load_model_config("tiny", ["cutoffs=[64, 128]", "cluster_divide=2"])).eval()
    assert len("".join(stream(Checkpoint(model, ByteTokenizer(), "x"), "a", tokens=40))) > 0
