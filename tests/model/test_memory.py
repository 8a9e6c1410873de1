"""The memory computes the paper's equations: folded projections against a plain transcription of them."""

import math

import pytest
import torch
from torch import Tensor

from lm.config import load_model_config
from lm.model import PMI
from lm.model.attention import Span
from lm.model.delta import DeltaWrite, Taps, Unit, Writes, advance
from lm.model.memory import MAX_RETENTION, MemoryModule, compete
from lm.model.state import Memory, Open
from tests.model.variants import build


def heads(x: Tensor, count: int) -> Tensor:
    return x.unflatten(-1, (count, -1)).transpose(-2, -3)  # [..., h, n, e]


def attention(q: Tensor, k: Tensor, v: Tensor, top_k: int | None, causal: bool = False) -> Tensor:
    """softmax(Q K^T / sqrt(e)) V with every head spelled out; top-k keeps the largest and zeroes the rest."""
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:]).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    if top_k is not None:
        threshold = weights.topk(min(top_k, weights.shape[-1]), -1).values[..., -1:]
        weights = torch.where(weights >= threshold, weights, 0)
    return (weights @ v).transpose(-2, -3).flatten(-2)


def written(module: MemoryModule, working: Tensor, h: Tensor) -> Tensor:
    """The paper's write up to its gates (section 2, appendix 'Gating'), one token projection at a time."""
    w, c = module.write, module.config
    query = torch.einsum("bnd,dhe->bhne", working, w.query)
    key, value = torch.einsum("btw,hew->bhte", h, w.key), torch.einsum("btw,hew->bhte", h, w.value)
    attended = attention(query, key, value, c.top_k)
    candidate = w.norm_candidate(working + w.mlp(w.norm_attended(working + attended)))
    if c.gate == "none":
        return candidate.tanh()
    seen = torch.relu(h @ module.gate_tokens.weight.T).mean(1, keepdim=True)
    k_i, k_f = (w.gate_slots(working.tanh())).chunk(2, -1)
    take, keep = torch.sigmoid(seen + k_i + w.gate_bias[0]), torch.sigmoid(seen + k_f + w.gate_bias[1])
    return take * candidate.tanh() + MAX_RETENTION * keep * working


def read(module: MemoryModule, memory: Memory, h: Tensor) -> Tensor:
    """The paper's read: U_w, U_l, U_wl with every token projected."""
    c, r, d = module.config, module.read, module.readout_working.value.shape[0]

    def project(x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("btw,whe->bhte", x, weight)

    levels = {"w": (module.readout_working, memory.working), "l": (module.readout_long_term, memory.long_term.mean(1))}
    u = {}
    for name, (p, slots) in levels.items():
        top_k = c.top_k if name == "l" else None
        u[name] = attention(project(h, p.query), project(slots, p.key), project(slots, p.value), top_k)
    if not c.correction:
        return r.out(r.alpha * u["w"] + (1 - r.alpha) * u["l"])
    to_kv, to_q = module.readout_working.further.flatten(0, 1), module.readout_long_term.further.flatten(0, 1)
    keys, values = (u["w"] @ to_kv).split(d, -1)
    u_wl = attention(heads(u["l"] @ to_q, c.heads), heads(keys, c.heads), heads(values, c.heads), None, causal=True)
    return r.out(r.alpha * u["w"] + (1 - r.alpha) * u_wl)


@pytest.mark.parametrize("gate", ["unit", "memory", "none"])
@pytest.mark.parametrize("top_k", ["null", "1", "3"])
def test_write_is_the_papers_equations(gate: str, top_k: str) -> None:
    module = build([f"memory.gate={gate}", f"memory.top_k={top_k}"]).memories[0]
    memory, h = Memory(torch.randn(2, 4, 32), torch.randn(2, 3, 32, 32)), torch.randn(2, 1, 8, 32)
    _, after = module.scan(memory, h, None, memory)
    torch.testing.assert_close(after.working, written(module, memory.working, h[:, 0]), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("correction", ["true", "false"])
@pytest.mark.parametrize("top_k", ["null", "2"])
def test_read_is_the_papers_equations(correction: str, top_k: str) -> None:
    module = build([f"memory.correction={correction}", f"memory.top_k={top_k}", "memory.consolidation=probe"]).memories[0]
    memory, h = Memory(torch.randn(2, 4, 32), torch.randn(2, 3, 4, 32)), torch.randn(2, 8, 32)
    readout = module.readout(memory)
    span = Span(1, 8, torch.empty(0), torch.empty(0))
    blank = Open(*(torch.empty(0) for _ in range(3)))
    got, _ = module.read(type(readout)(*(x[:, None] for x in readout)), h[:, None], blank, span, False)
    torch.testing.assert_close(got[:, 0], read(module, memory, h), rtol=1e-4, atol=1e-5)


def test_probe_is_the_outer_product_contracted_and_paper_contracts_with_ones() -> None:
    for consolidation in "probe", "paper":
        module = build([f"memory.consolidation={consolidation}"]).memories[0].consolidate
        long_term, working = torch.randn(2, 3, 4, 32), torch.randn(2, 4, 32)
        head_count = 4 if consolidation == "probe" else 1
        outer = torch.einsum(
            "bnhi,bcnhj->bcnhij", working.unflatten(-1, (head_count, -1)), long_term.unflatten(-1, (head_count, -1))
        )
        probe = module.probe.expand(3, -1, -1)
        product = torch.einsum("bcnhij,chj->bcnhi", outer, probe).flatten(-2)
        torch.testing.assert_close(module(long_term, working), module.norm(long_term + product), rtol=1e-4, atol=1e-5)


def test_published_consolidation_stops_after_its_first_write_and_probe_does_not() -> None:
    moved = {}
    for consolidation in "paper", "probe":
        module = build([f"memory.consolidation={consolidation}"]).memories[0].consolidate
        torch.manual_seed(0)
        first = module(torch.randn(1, 3, 4, 32), torch.randn(1, 4, 32))
        moved[consolidation] = ((module(first, torch.randn(1, 4, 32)) - first).norm() / first.norm()).item()
    assert moved["paper"] < 1e-5
    assert moved["probe"] > 0.1


@pytest.mark.parametrize("top_k", [None, 3])
@pytest.mark.parametrize("convolution", [1, 3])
def test_a_segments_delta_writes_equal_one_token_after_the_other(top_k: int | None, convolution: int) -> None:
    model = build([f"memory.delta.top_k={top_k or 'null'}", f"memory.delta.convolution={convolution}"])
    write: DeltaWrite = model.memories[0].delta_tokens
    h, memory = torch.randn(2, 2, 8, 32), torch.randn(2, 3, 32, 32)
    expected, got = memory.double(), memory
    for s, transition in enumerate(write(h).unbind()):
        got = advance(got, transition)
        expected = write.retention[:, None, None].double() * expected
        keys = write.key(h[:, s])
        if write.taps is not None:
            padded = torch.cat([torch.zeros(2, convolution - 1, keys.shape[-1]), keys], 1)
            keys = sum(tap * padded[:, convolution - 1 - lag : convolution - 1 - lag + 8] for lag, tap in enumerate(write.taps))
        keys = torch.nn.functional.normalize(keys.unflatten(-1, (3, -1)), dim=-1).double()
        values = write.value(h[:, s]).unflatten(-1, (3, -1)).double()
        strength = (write.strength(h[:, s]) + write.strength_bias).sigmoid().double()
        if top_k is not None:
            strength = torch.where(strength >= strength.topk(top_k, 1).values[:, -1:], strength, 0)
        for t in range(8):
            key, value = keys[:, t], values[:, t]
            error = value - torch.einsum("bck,bckv->bcv", key, expected)
            expected = expected + strength[:, t, :, None, None] * key[..., None] * error[:, :, None]
    torch.testing.assert_close(got.double(), expected, rtol=1e-4, atol=1e-4)


def test_conflicting_writes_cannot_pump_a_fragment_up() -> None:
    model = build(["memory.delta.key_width=6"])
    write = model.memories[0].delta_tokens
    with torch.no_grad():
        write.time_scale.fill_(50.0)  # never forgets
        write.value.weight.mul_(100)
    memory = torch.zeros(1, 3, 6, 32)
    for _ in range(50):
        for transition in write(torch.randn(1, 8, 8, 32)).unbind():
            memory = advance(memory, transition)
    assert float(memory.square().mean((-2, -1)).sqrt().max()) <= 4.0 + 1e-4


def test_competition_keeps_exactly_k_even_among_ties() -> None:
    weights = compete(torch.zeros(3, 7), 4)
    assert (weights > 0).sum(-1).tolist() == [4, 4, 4]
    assert compete(torch.randn(3, 7), None).sum(-1).allclose(torch.ones(3))


@pytest.mark.parametrize("shape", [(40, 20, 8), (3, 30, 40), (2, 6)])
@pytest.mark.parametrize("top_k", [1, 5])
def test_competition_is_softmax_with_all_but_the_largest_taken_away(shape: tuple[int, ...], top_k: int) -> None:
    """In whichever way the largest are found; and so is its gradient."""
    scores, wanted = torch.randn(shape, dtype=torch.float64, requires_grad=True), torch.randn(shape, dtype=torch.float64)
    weights = scores.softmax(-1)
    expected = weights * (weights >= weights.topk(top_k, -1).values[..., -1:])
    torch.testing.assert_close(compete(scores, top_k), expected)
    (slope,) = torch.autograd.grad((compete(scores, top_k) * wanted).sum(), scores)
    torch.testing.assert_close(slope, torch.autograd.grad((expected * wanted).sum(), scores)[0])
    tied = compete(torch.zeros(shape), top_k)
    assert set((tied > 0).sum(-1).flatten().tolist()) == {top_k}


def test_a_new_memory_of_tokens_recalls_what_followed() -> None:
    """It starts as an induction head: asked with a token, it answers with the value of the one that came behind it."""
    torch.manual_seed(0)
    model = PMI(load_model_config("tiny", ["memory.read=long_term", "memory.fragments=2", "memory.delta.key_width=32"]))
    module = model.memories[0]
    h = torch.randn(1, 1, 8, model.config.width)
    with torch.no_grad():
        written = advance(torch.zeros(1, 2, 32, 32), module.delta_tokens(h).unbind()[0])
        asked = module.read.delta(h, written[:, None])[0, 0]  # what each token brings to mind
        values = module.read.delta.up(module.delta_tokens.value(h), torch.ones(()))[0, 0]
        nearest = torch.cosine_similarity(asked[:-1, None], values[None], dim=-1).argmax(-1)
    assert int((nearest == torch.arange(1, 8)).sum()) >= 6  # keys overlap a little; drawn apart, it is 1 or 2 of 7


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_the_delta_rules_own_gradients_are_those_of_what_they_compute(rows: int) -> None:
    torch.manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(2, 2, *shape, dtype=torch.float64, requires_grad=True)

    keys = torch.nn.functional.normalize(draw(rows, 4), dim=-1).detach().requires_grad_()
    strength = torch.rand(2, 2, rows, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Writes.apply, (keys, draw(rows, 3), strength))
    assert torch.autograd.gradcheck(Unit.apply, (draw(rows, 4),))
    taps = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(Taps.apply, (draw(rows, 4), taps))


def test_a_row_that_is_not_written_gives_and_takes_no_gradient() -> None:
    torch.manual_seed(0)
    keys, values = (torch.randn(1, 1, 5, 4, requires_grad=True) for _ in range(2))
    strength = torch.tensor([0.5, 0.0, 0.7, 0.0, 0.2])[None, None, :, None].requires_grad_()
    Writes.apply(keys, values, strength).square().sum().backward()
    for x in (keys, values):
        assert x.grad is not None
        assert x.grad[0, 0, [1, 3]].abs().max() == 0
        assert x.grad[0, 0, [0, 2, 4]].abs().min() > 0
    assert strength.grad is not None
    assert bool(strength.grad.isfinite().all())


def test_a_shut_hard_gate_writes_nothing_and_an_open_one_keeps_all() -> None:
    model = build(["memory.delta.gates=hard"])
    write = model.memories[0].delta_tokens
    memory = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        write.strength_bias.fill_(-50.0)
        write.time_scale.fill_(50.0)
        after = memory
        for transition in write(torch.randn(1, 500, 8, 32)).unbind():
            after = advance(after, transition)
        assert torch.equal(after, memory), "after any length of text"
        write.strength_bias.fill_(0.0)
        assert 0 < float(write.strengths(torch.randn(1, 1, 8, 32)).mean()) < 1
        write.gates = "soft"
        write.strength_bias.fill_(-7.0)
        for transition in write(torch.randn(1, 500, 8, 32)).unbind():
            after = advance(after, transition)
        assert (after - memory).norm() > 0.05 * memory.norm(), "a sigmoid is worn away"
