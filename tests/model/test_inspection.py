"""Looking into a memory changes nothing and shows what the model itself computes."""

import pytest
import torch

from lm.model.inspection import inspect_memory, trace_reads
from lm.model.state import tensors
from tests.model.variants import build

VARIANTS = [
    [],
    ["memory.scope=global", "memory.layers=all"],
    ["memory.consolidation=probe", "memory.correction=true"],
    ["memory.consolidation=paper", "memory.parameters=tied", "memory.layers=[0, 2]"],
    ["memory.read=long_term"],
    ["memory.read=working", "memory.gate=memory"],
    ["memory.gate=none", "memory.delta.source=both", "memory.delta.top_k=2"],
    ["memory.verbatim={contexts: [1, 3], rows: 40}", "memory.layers=all"],
]


@pytest.mark.parametrize("changes", VARIANTS, ids=" ".join)
def test_the_last_segments_reads_and_gates_are_shown_wherever_the_tail_ends(changes: list[str]) -> None:
    model = build(changes).eval()
    config, t = model.config, model.config.segment
    assert config.memory is not None
    ids = torch.randint(0, config.vocab_size, (1, 5 * t))
    with torch.inference_mode():
        _, state = model(ids[:, : 2 * t], model.initial_state(1))
    before = state.clone()
    for count in (1, t - 1, t, t + 3, 3 * t):
        shown = inspect_memory(model, state, ids[0, 2 * t : 2 * t + count].tolist())
        last = (count - 1) % t + 1
        assert shown.position == 2 * t + count
        assert shown.ids == ids[0, 2 * t + count - last : 2 * t + count].tolist()
        assert [layer.layer for layer in shown.layers] == config.memory_layers
        for layer in shown.layers:
            for rows in (layer.working_attention, layer.long_term_attention, layer.write_strength):
                assert rows is None or len(rows) == last
            if layer.working_attention is not None:
                assert torch.tensor(layer.working_attention).sum(-1).allclose(torch.ones(last))
            assert (layer.working_attention is None) == (config.memory.read == "long_term")
            assert (layer.long_term_attention is None) == (config.memory.read == "working")
            assert (layer.take is None) == (config.memory.gate == "none" or not config.memory.keeps_working)
            assert (layer.verbatim_used is None) == (layer.verbatim_answers is None) == (config.memory.verbatim is None)
            if layer.verbatim_used is not None and layer.verbatim_answers is not None:
                assert len(layer.verbatim_used) == len(layer.verbatim_answers[0]) == 2
                assert all(0 < share < 0.5 for share in layer.verbatim_used)
                assert len(layer.verbatim_answers) == last
            for gate in (layer.take, layer.keep):
                assert gate is None or all(0 < x < 1 for x in gate)
    assert all(torch.equal(x, y) for x, y in zip(tensors(state), tensors(before), strict=True))
    assert not any(module.read._forward_pre_hooks for module in model.memories)


def test_the_gates_shown_are_those_that_the_write_uses() -> None:
    model = build([]).eval()
    t = model.config.segment
    ids = torch.randint(0, model.config.vocab_size, (1, 2 * t))
    with torch.inference_mode():
        _, state = model(ids[:, :t], model.initial_state(1))
        seen: list[torch.Tensor] = []
        gates = model.memories[0].write.gates
        model.memories[0].write.gates = lambda *given: seen.extend(gates(*given)) or gates(*given)
        model(ids[:, t:], state)
        del model.memories[0].write.gates
        layer = inspect_memory(model, state, ids[0, t:].tolist()).layers[0]
    assert torch.tensor(layer.take).allclose(seen[0].mean(-1)[0])
    assert torch.tensor(layer.keep).allclose(seen[1].mean(-1)[0])


def test_a_lane_inside_a_segment_or_without_ids_is_refused() -> None:
    model = build([]).eval()
    with pytest.raises(ValueError, match="boundary"):
        inspect_memory(model, model.initial_state(1), [])
    with torch.inference_mode():
        _, state = model(torch.zeros(1, 3, dtype=torch.long), model.initial_state(1))
    with pytest.raises(ValueError, match="boundary"):
        inspect_memory(model, state, [1])


@pytest.mark.parametrize("changes", VARIANTS, ids=" ".join)
def test_a_trace_finds_the_ids_whose_features_move_what_is_read(changes: list[str]) -> None:
    """Against finite differences: an id's features are pushed where it was written, and the reading is taken again."""
    model = build([*changes, "window=0", "layers=2", "memory.layers=[0]"]).eval().double()
    t = model.config.segment
    ids = torch.randint(0, model.config.vocab_size, (2 * t + 3,)).tolist()
    (layer,) = trace_reads(model, ids).layers
    module, read = model.memories[0], {}
    features = []
    module.read.register_forward_pre_hook(lambda _, given: features.append(given[1]))
    with torch.no_grad():
        state = model.initial_state(1)
        for first in range(0, len(ids), t):
            _, state = model(torch.tensor([ids[first : first + t]]), state)

        def levels(pushed: list[torch.Tensor]) -> tuple[torch.Tensor | None, torch.Tensor | None]:
            memory = model.initial_memory(1)[0]
            for h in pushed:
                memory = module.scan(memory, h, None, memory)[1]
            readout = module.readout(memory)
            return module.read.levels(type(readout)(*(x[:, None] for x in readout)), features[-1][:, :, -1:])

        base = levels(features[:2])
        for number in range(2 * t):
            moved = [0.0, 0.0]
            for _ in range(12):
                pushed = [h.clone() for h in features[:2]]
                pushed[number // t][0, 0, number % t] += 1e-6 * torch.randn(model.config.width, dtype=torch.float64)
                for i, (a, b) in enumerate(zip(base, levels(pushed), strict=True)):
                    moved[i] += 0.0 if a is None or b is None else float((a - b).square().sum())
            read[number] = [x**0.5 for x in moved]
    for i, shares in enumerate((layer.working, layer.long_term)):
        if shares is None:
            continue
        expected = torch.tensor([read[number][i] for number in range(2 * t)])
        assert shares[2 * t :] == [0.0, 0.0, 0.0]
        torch.testing.assert_close(torch.tensor(shares[: 2 * t]), (expected / expected.sum()).float(), rtol=0.6, atol=0.01)


def test_a_trace_of_verbatim_tables_is_of_what_followed_the_same_wording() -> None:
    model = build(["memory.verbatim={contexts: [1, 2], rows: 100000}"]).eval()
    t = model.config.segment
    ids = [5, 6, 7, 1, 6, 8, 2, 3, *[9] * t, 0, 7, 6, 1, 5, 5, 5, 5, 5, 6]  # the last wordings: "6" and "5 6"
    assert len(ids) % t == 2
    (layer,) = trace_reads(model, ids).layers
    assert layer.verbatim is not None
    assert {place for place, share in enumerate(layer.verbatim) if share > 0} == {2, 5, 2 * t + 3}  # 7, 8 and 1 came behind 6
    assert layer.verbatim[2] > layer.verbatim[5]  # and 7 behind "5 6", too
    assert sum(layer.verbatim) == pytest.approx(1)
    assert trace_reads(build([]), ids).layers[0].verbatim is None
