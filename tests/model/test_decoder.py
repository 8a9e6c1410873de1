"""The decoder's parts: its whole stack against a plain transcription, initialisation, dropout, long calls."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from lm.config import ModelConfig, load_model_config
from lm.model import PMI, decoder
from lm.model.attention import attend
from lm.model.decoder import SquaredReLU
from tests.model.variants import BASE, build


def turned(x: Tensor, offsets: Tensor, base: float) -> Tensor:
    """Rotary as published: features 2i and 2i+1 turn by offset * base^(-2i / e); x [b, t, h, e]."""
    half = x.shape[-1] // 2
    angle = (offsets[:, None] * base ** (-torch.arange(half) / half))[:, None]
    even, odd = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    pairs = torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1).flatten(-2)
    return torch.cat([pairs, x[..., 2 * half :]], -1)


def plain(model: PMI, tokens: Tensor) -> Tensor:
    """A window-only model, every query and key spelled out: its segment up to itself, and W tokens before the segment."""
    config, (lanes, length) = model.config, tokens.shape
    places = torch.arange(length)
    begin = places // config.segment * config.segment
    seen = (places[None] <= places[:, None]) & (places[None] >= begin[:, None] - config.window)
    x = model.embedding(tokens)
    for block in model.blocks:
        h = block.attention_norm(x)
        q, k, v = block.attention.qkv(h).unflatten(-1, (3, config.heads, -1)).unbind(-3)
        q, k = (turned(part, places, config.rotary_base) for part in (q, k))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / math.sqrt(q.shape[-1])
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
        x = x + block.attention.out(torch.einsum("bhqk,bkhe->bqhe", weights, v).reshape(lanes, length, -1))
        x = x + block.fall(F.relu(block.rise(block.feedforward_norm(x))) ** 2)
    return model.norm(x)


@pytest.mark.parametrize("overrides", [[], ["rotary_base=50"], ["window=5"], ["window=20"], ["heads=4", "width=36"]], ids=str)
def test_without_memory_the_model_is_a_plain_transformer_over_its_window(overrides: list[str]) -> None:
    model = build(["memory=off", *overrides]).eval()
    tokens = torch.randint(23, (2, 40))
    with torch.no_grad():
        hidden, _ = model(tokens, model.initial_state(2))
        torch.testing.assert_close(hidden, plain(model, tokens), rtol=1e-4, atol=1e-5)


def test_squared_relu_has_the_gradient_of_its_formula() -> None:
    x = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(SquaredReLU.apply, x)


def test_a_new_model_adds_nothing_to_its_embedding_and_starts_near_the_uniform_loss() -> None:
    config = ModelConfig.model_validate({**BASE, "vocab_size": 200, "embedding_std": 0.3})
    torch.manual_seed(0)
    model = PMI(config)
    assert float(model.embedding.table_0.std()) == pytest.approx(0.3, rel=0.05)
    tokens = torch.randint(200, (4, 64))
    hidden, _ = model(tokens, model.initial_state(4))
    torch.testing.assert_close(hidden, model.norm(model.embedding(tokens)))
    loss = float(model.head.loss(hidden, torch.randint(200, (4, 64)))) / tokens.numel()
    assert math.log(200) < loss < math.log(200) + 1.5  # logits of unit variance, but for the token's own


def test_dropout_acts_while_training_alone() -> None:
    model = build(["dropout=0.5"]).train()
    tokens = torch.randint(23, (2, 16))

    def hidden() -> Tensor:
        return model(tokens, model.initial_state(2))[0]

    assert not torch.equal(hidden(), hidden())
    model.eval()
    assert torch.equal(hidden(), hidden())


@pytest.mark.parametrize("scope", ["layer", "global"])
def test_a_call_longer_than_one_pass_equals_one_pass(monkeypatch: pytest.MonkeyPatch, scope: str) -> None:
    model = build([f"memory.scope={scope}"])
    tokens, starts = torch.randint(23, (3, 80)), torch.rand(3, 10) < 0.3
    whole, after = model(tokens, model.initial_state(3), starts=starts)
    monkeypatch.setattr(decoder, "MAX_TOKENS", 24)
    cut, after_cut = model(tokens, model.initial_state(3), starts=starts)
    torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-5)
    for one, other in zip(after.memories, after_cut.memories, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert after.position.tolist() == after_cut.position.tolist()


@pytest.mark.parametrize("overrides", [[], ["memory.consolidation=delta", "memory.read=long_term"], ["memory.scope=global"]])
def test_one_seed_gives_one_decoder_with_memory_on_or_off(overrides: list[str]) -> None:
    """So runs with and without memory start as the same function, and differ by what memory does."""
    models = []
    for changes in (overrides, ["memory=off"]):
        torch.manual_seed(3)
        models.append(PMI(load_model_config("tiny", changes)).eval())
    on, off = (model.state_dict() for model in models)
    assert len(on) > len(off)
    assert all(torch.equal(on[name], weight) for name, weight in off.items())
    tokens = torch.randint(0, 257, (2, 3 * models[0].config.segment))
    with torch.no_grad():
        (said, _), (expected, _) = (model(tokens, model.initial_state(2)) for model in models)
    torch.testing.assert_close(said, expected)


def graph(x: Tensor) -> set[str]:
    """The names of all operations that made `x`."""
    names, left = set(), [x.grad_fn]
    while left:
        node = left.pop()
        if node is not None:
            names.add(node.name())
            left += [before for before, _ in node.next_functions]
    return names


@pytest.mark.parametrize("lanes", [1, 3])
def test_attention_trained_in_bfloat16_is_that_of_float32_within_its_rounding(lanes: int) -> None:
    """Laid out on processors, fused elsewhere: values and gradients; the mask of one lane or of each."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(3, 2, rows, 4, 16) for rows in (8, 20, 20))
    mask = torch.zeros(lanes * 2 if lanes > 1 else 1, 1, 8, 20).masked_fill_(torch.ones(8, 20).triu(13).bool(), -torch.inf)
    wanted = torch.randn(3, 2, 8, 64)
    found = {}
    for dtype in torch.float32, torch.bfloat16:
        given = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        mixed = attend(*given, mask)
        assert mixed.dtype == dtype
        found[dtype] = [mixed, *torch.autograd.grad((mixed.float() * wanted).sum(), given)]
        assert "Softmax" in str(graph(mixed)) if dtype == torch.bfloat16 else "ScaledDot" in str(graph(mixed))
    for exact, rounded in zip(*found.values(), strict=True):
        assert float((rounded.detach().float() - exact.detach()).norm() / exact.detach().norm()) < 0.02
    with torch.no_grad():  # where nothing is trained it stays fused
        fused = attend(*(x.bfloat16() for x in (q, k, v)), mask)
    assert float((fused - found[torch.bfloat16][0]).float().abs().max()) < 0.05
