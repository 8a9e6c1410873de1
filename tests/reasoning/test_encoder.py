"""The encoders: one memory implementation in the paper's order, every model trains, padding changes nothing."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from lm.errors import UserError
from lm.model.memory import MemoryModule
from lm.model.state import Memory
from lm.reasoning.build import build, load_data
from lm.reasoning.config import load_reason_config, reason_models
from lm.reasoning.encoder import Encoder, encoder_span, recall
from lm.reasoning.training import parameters
from tests.model.test_memory import attention, written
from tests.reasoning.conftest import tiny

CONVOLVED = [name for name in reason_models() if name.startswith("cnn")]


@pytest.mark.parametrize("name", reason_models())
def test_every_model_trains_and_every_parameter_gets_gradient(name: str) -> None:
    config = tiny("clevr", name, "encoder.layers=2") if name not in CONVOLVED else tiny("clevr", name)
    data = load_data(config, None, None)
    model = build(config, data, 1)
    optimiser = torch.optim.Adam(model.parameters(), 1e-3)
    inputs, answers = data.batch("train", torch.arange(24).numpy(), torch.device("cpu"))
    losses = []
    for _ in range(8):  # the answer's weights start at zero: behind them there is gradient from the second step on
        optimiser.zero_grad()
        loss = F.cross_entropy(model(inputs), answers)
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    still = [name for name, p in model.named_parameters() if p.grad is None or not float(p.grad.norm())]
    assert not still


def test_the_memory_is_the_language_models_own_class() -> None:
    for name in ("pmi-tr", "tr-hsw", "pmi-tr-without-1", "cnn-pmi"):
        config = tiny("clevr", name)
        memories = list(Encoder(config.encoder).memories)
        assert {type(memory) for memory in memories} == {MemoryModule}
        assert len(memories) == (config.encoder.layers if name == "pmi-tr-without-1" else 1)
    assert not list(Encoder(tiny("clevr", "tr").encoder).memories)


@pytest.mark.parametrize("correction", ["true", "false"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_layer_writes_first_and_reads_what_it_wrote(correction: str, padded: bool) -> None:
    """Algorithm 1, with every token projected, over the real positions only."""
    torch.manual_seed(0)
    config = tiny("clevr", "pmi-tr", f"encoder.memory.correction={correction}", "encoder.memory.heads=4").encoder
    module = MemoryModule(config)
    memory, h = Memory(torch.randn(2, 4, 16), torch.randn(2, 2, 4, 16)), torch.randn(2, 7, 16)
    real = torch.ones(2, 7, dtype=torch.bool)
    if padded:
        real[1, :3] = False
    got, after = recall(module, memory, h, real if padded else None, encoder_span(h, real if padded else None))
    for b in range(2):
        kept = h[b : b + 1, real[b]]
        working = written(module, memory.working[b : b + 1], kept)
        long_term = module.consolidate(memory.long_term[b : b + 1], working)
        torch.testing.assert_close(after.working[b : b + 1], working, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(after.long_term[b : b + 1], long_term, rtol=1e-4, atol=1e-5)
        expected = plain_read(module, Memory(working, long_term), kept)
        torch.testing.assert_close(got[b : b + 1, real[b]], expected, rtol=1e-4, atol=1e-5)


def plain_read(module: MemoryModule, memory: Memory, h: torch.Tensor) -> torch.Tensor:
    c, r = module.config, module.read

    def project(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.einsum("btw,whe->bhte", x, weight)

    u = []
    levels = ((module.readout_working, memory.working, None), (module.readout_long_term, memory.long_term.mean(1), c.top_k))
    for p, slots, top_k in levels:
        u.append(attention(project(h, p.query), project(slots, p.key), project(slots, p.value), top_k))
    u_w, u_l = u
    if c.correction:
        width = u_w.shape[-1]
        keys_values = u_w @ module.readout_working.further.flatten(0, 1)
        queries = u_l @ module.readout_long_term.further.flatten(0, 1)
        q, k, v = (
            x.unflatten(-1, (c.heads, -1)).transpose(-2, -3)
            for x in (queries, keys_values[..., :width], keys_values[..., width:])
        )
        u_l = attention(q, k, v, None)  # every position sees every other: no causal mask
    return r.out(r.alpha * u_w + (1 - r.alpha) * u_l)


@pytest.mark.parametrize("name", ["pmi-tr", "pmi-tr-without-3", "tr", "isab", "str", "tr-hsw"])
def test_padding_changes_nothing(name: str) -> None:
    torch.manual_seed(0)
    encoder = Encoder(tiny("babi", name).encoder).eval()
    x = torch.randn(2, 9, 16)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[0, :4] = False
    changed = x.clone()
    changed[0, :4] = 100 * torch.randn(4, 16)
    out, other = encoder(x, real), encoder(changed, real)
    torch.testing.assert_close(out[real], other[real])
    if name != "str":  # whose pattern is one of absolute places
        torch.testing.assert_close(out[:1, 4:], encoder(x[:1, 4:], None), rtol=1e-4, atol=1e-5)


def test_the_global_memory_goes_through_the_layers_and_the_separate_one_does_not() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 5, 16)
    for name, count in (("pmi-tr", 1), ("pmi-tr-without-1", 3)):
        encoder = Encoder(tiny("babi", name, "encoder.layers=3").encoder)
        assert encoder.initial_memory is not None
        assert encoder.initial_memory.count == count
        seen: list[torch.Tensor] = []
        for module in encoder.memories:
            module.write.register_forward_pre_hook(lambda _, given, seen=seen: seen.append(given[0]))
        encoder(x, None)
        started = [memory.working for memory in encoder.initial_memory(2)]
        assert len(seen) == 3
        assert torch.equal(seen[0], started[0])
        assert torch.equal(seen[1], started[1]) if count == 3 else not torch.allclose(seen[1], seen[0])


def test_sparse_attention_hides_most_pairs_but_nothing_from_the_class_token() -> None:
    from lm.reasoning.encoder import SparseAttention

    pattern = SparseAttention(16, 2).pattern(26, torch.device("cpu"))[0]
    seen = pattern == 0
    assert seen.shape == (2, 26, 26)
    assert seen[:, -1].all()
    assert seen[:, :, -1].all()
    assert seen.float().mean() < 0.35
    reach = (seen[0].float() @ seen[1].float()) > 0  # two layers, or two heads in turn: everything sees everything
    assert reach.all()


def test_parameter_counts_at_the_papers_sizes() -> None:
    from lm.reasoning import paper, report
    from lm.reasoning.tasks.dataset import Dataset

    about, answers = report.ABOUT["babi"]
    blank = Dataset({}, {}, ["x"] * answers, [], [], about)
    counts = {}
    for name in ("pmi-tr-s", "pmi-tr-m", "pmi-tr-l", "pmi-tr-without-1", "tr", "tr-hc", "tr-hsw"):
        config = load_reason_config("babi", name, "paper")
        with torch.device("meta"):
            counts[name] = parameters(build(config, blank, 1))
    shown = {row[0]: row[1] for row in report.sizes("paper").rows}
    assert shown["pmi-tr-without-1"] == f"{counts['pmi-tr-without-1'] / 1e6:.2f} (16.48)"
    assert shown["tr"] == f"{counts['tr'] / 1e6:.2f}"
    d = 256
    memory = 20 * d * d + 12 * d + 5 * d + 1 + (8 + 5 * 8) * d  # projections; norms, biases and gates; probes; alpha; initial
    assert counts["pmi-tr-m"] - counts["tr"] == memory - 4 * d * d
    assert counts["pmi-tr-s"] == counts["pmi-tr-m"] == counts["pmi-tr-l"]  # layers are tied, heads split the width
    assert counts["tr-hc"] - counts["tr"] == 7 * (4 * d * d + 2 * 2 * d + 2 * d * 1024 + 1024 + d)
    assert 7.0 < counts["pmi-tr-without-1"] / counts["pmi-tr-m"] < 8.0  # the paper's: 16.48M / 2.33M = 7.07
    assert paper.lookup(paper.PARAMETERS["babi"], "babi", "pmi-tr") == 2.33
    assert paper.lookup(paper.PARAMETERS["clevr"], "clevr", "pmi-tr") == 2.29
    assert paper.lookup(paper.PARAMETERS["clevr"], "clevr", "soft") is None  # the paper has it in another size


@pytest.mark.parametrize("preset", ["cpu", "paper"])
@pytest.mark.parametrize("task", ["babi", "clevr", "triangles", "cifar"])
def test_every_preset_of_every_model_and_size_is_valid(task: str, preset: str) -> None:
    for name in reason_models():
        for size in ("", "-s", "-m", "-l"):
            if not (task == "babi" and name in CONVOLVED):
                assert load_reason_config(task, name + size, preset).encoder.width >= 64


@pytest.mark.parametrize("task", ["triangles", "cifar"])
def test_an_answer_needs_a_question_to_be_read_from(task: str) -> None:
    with pytest.raises(UserError, match=f"encoder.answer is question, but {task} asks none; choose token"):
        load_reason_config(task, "tr", "cpu", ["encoder.answer=question"])


@pytest.mark.parametrize(("answer", "positions"), [("question", 3), ("token", 4)])  # 2 sentences, question, class token
def test_a_look_shows_the_weights_of_every_layer(babi: Path, answer: str, positions: int) -> None:
    config = tiny("babi", "pmi-tr", "encoder.layers=3", f"encoder.answer={answer}")
    data = load_data(config, babi, None)
    model = build(config, data, 1).eval()
    inputs, _ = data.batch("test", torch.tensor([0]).numpy(), torch.device("cpu"))
    looks = model.look(inputs)
    assert len(looks) == 3
    for look in looks:
        assert look.working is not None
        assert look.long_term is not None
        assert look.working.shape == look.long_term.shape == (1, positions, 4)  # 4 slots
        torch.testing.assert_close(look.working.sum(-1), torch.ones(1, positions))
    assert not torch.allclose(looks[0].working, looks[1].working)
    assert not any(module.read._forward_pre_hooks for module in model.encoder.memories)
