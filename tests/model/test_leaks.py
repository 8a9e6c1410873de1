"""The proofs can fail: a leaky memory and an inert one are caught, in the proofs and by `pmi certify`."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lm.cli import app
from lm.commands import run
from lm.config import load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.model import PMI
from lm.model.memory import MemoryModule
from lm.model.pretrained import from_pretrained, save_pretrained
from lm.model.proofs import boundedness, causality, cutting, draw_zeros, prove
from lm.model.state import Memory, State
from tests.model.variants import build

scan, group = MemoryModule.scan, PMI._group


def published_order(
    self: MemoryModule, memory: Memory, h: Tensor, starts: Tensor | None, initial: Memory
) -> tuple[Memory, Memory]:
    """Write, then read in the same segment: every token sees what later tokens of its segment wrote."""
    before, after = scan(self, memory, h, starts, initial)
    shifted = (torch.cat([level[:, 1:], last[:, None]], 1) for level, last in zip(before, after, strict=True))
    return Memory(*shifted), after


@pytest.mark.parametrize(
    "overrides", [[], ["memory.consolidation=probe"], ["memory.layers=all", "memory.correction=true"]], ids=" ".join
)
def test_the_published_order_is_caught_as_a_leak(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(overrides)
    monkeypatch.setattr(MemoryModule, "scan", published_order)
    results = {proof.name: proof for proof in prove(model, segments=8)}
    assert not results["causality"].passed
    assert results["causality"].figure > 1e-3
    assert not results["call cutting"].passed


def written_before_read(self: PMI, tokens: Tensor, state: State, starts: Tensor | None) -> tuple[Tensor, State]:
    """The same for a memory that all layers share: its readouts are made of what the segment itself wrote."""
    _, after = group(self, tokens, state, starts)
    hidden, read = group(self, tokens, state._replace(memories=after.memories), starts)
    return hidden, read._replace(memories=after.memories)


PAPER = ["memory.scope=global", "memory.parameters=tied", "memory.layers=all", "memory.correction=true"]


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["memory.scope=global"],
        ["memory.scope=global", "memory.layers=all"],
        [*PAPER, "memory.consolidation=paper"],
        [*PAPER, "memory.consolidation=probe"],
    ],
    ids=" ".join,
)
def test_the_published_order_is_caught_in_either_scope(overrides: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build(overrides)
    assert causality(model, torch.Generator().manual_seed(0)).passed
    monkeypatch.setattr(PMI, "_group", written_before_read)
    leak = causality(model, torch.Generator().manual_seed(0))
    assert not leak.passed
    assert leak.figure > 1e-3
    assert not cutting(model, torch.Generator().manual_seed(0)).passed


def test_a_leak_behind_a_zero_projection_would_pass_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = PMI(build([]).config).eval()
    monkeypatch.setattr(MemoryModule, "scan", published_order)
    assert {p.name: p for p in prove(model, segments=8)}["causality"].passed  # which is why zeros are drawn at random
    assert not {p.name: p for p in prove(draw_zeros(model), segments=8)}["causality"].passed


def test_correction_without_its_mask_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    from lm.model import memory

    def unmasked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        return attend(q, k, v, torch.zeros(q.shape[2], k.shape[2]))

    attend = memory.attend
    model = build(["memory.correction=true"])
    monkeypatch.setattr(memory, "attend", unmasked)
    assert not {p.name: p for p in prove(model, segments=8)}["causality"].passed


def test_an_inert_memory_is_caught() -> None:
    model = build([])
    torch.nn.init.zeros_(model.memories[0].read.out.weight)
    liveness = {p.name: p for p in prove(model, segments=8)}["liveness"]
    assert not liveness.passed
    assert "memory inert" in liveness.detail


def test_an_inert_memory_is_caught_where_the_window_is_no_multiple_of_the_segment() -> None:
    model = build(["window=1", "layers=16", "embedding_std=0.3"])
    torch.nn.init.zeros_(model.memories[0].read.out.weight)
    assert not {p.name: p for p in prove(model, segments=8)}["liveness"].passed


def test_a_memory_that_grows_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def growing(self: MemoryModule, memory: Memory, h: Tensor, starts: Tensor | None, initial: Memory) -> tuple[Memory, Memory]:
        before, after = scan(self, memory, h, starts, initial)
        return before, Memory(after.working, memory.long_term + 1)

    model = build([])
    monkeypatch.setattr(MemoryModule, "scan", growing)
    assert not {p.name: p for p in prove(model, segments=40)}["boundedness"].passed


@pytest.mark.parametrize(
    ("overrides", "level", "segments", "rate"),
    [
        ([], "working", 40, 0.1),
        ([], "working", 200, 0.03),
        (["memory.consolidation=probe"], "long_term", 40, 0.1),
        (["memory.consolidation=paper", "memory.scope=global"], "long_term", 40, 0.1),
        ([], "long_term", 200, 0.1),  # an associative matrix may fill up to its own ceiling first
    ],
)
def test_a_memory_that_grows_slowly_is_caught(
    overrides: list[str], level: str, segments: int, rate: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def growing(self: MemoryModule, memory: Memory, h: Tensor, starts: Tensor | None, initial: Memory) -> tuple[Memory, Memory]:
        before, after = scan(self, memory, h, starts, initial)
        return before, after._replace(**{level: getattr(memory, level) + rate * h.shape[1]})

    model = build(overrides)
    monkeypatch.setattr(MemoryModule, "scan", growing)
    bounded = boundedness(model, torch.Generator().manual_seed(0), segments)
    assert not bounded.passed
    assert f"0.{level}" in bounded.detail


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    model = draw_zeros(PMI(load_model_config("tiny", ["width=32", "segment=8", "window=8"])))
    save_pretrained(model, ByteTokenizer(), tmp_path / "model")
    return tmp_path / "model"


def test_certify_passes_a_sound_checkpoint_and_writes_json(checkpoint: Path, tmp_path: Path) -> None:
    assert run(app, ["certify", str(checkpoint), "--json", str(tmp_path / "c.json"), "--segments", "40"]) == 0
    assert '"passed": true' in (tmp_path / "c.json").read_text()


def test_certify_fails_a_leaky_checkpoint(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryModule, "scan", published_order)
    assert run(app, ["certify", str(checkpoint), "--segments", "8"]) == 1


def test_certify_calls_a_fresh_checkpoint_inert_but_its_baseline_fine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for overrides, code in ([], 1), (["memory=off"], 0):
        folder = tmp_path / f"model{code}"
        save_pretrained(PMI(load_model_config("tiny", [*overrides, "width=32"])), ByteTokenizer(), folder)
        assert run(app, ["certify", str(folder), "--segments", "8"]) == code
    assert "liveness" in capsys.readouterr().err


def test_certify_says_of_each_proof_why_a_checkpoint_with_nan_fails(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = from_pretrained(checkpoint)
    with torch.no_grad():
        broken.model.blocks[1].rise.weight[0, 0] = torch.nan
    save_pretrained(broken.model, broken.tokenizer, tmp_path / "broken")
    report = tmp_path / "c.json"
    assert run(app, ["certify", str(tmp_path / "broken"), "--segments", "8", "--json", str(report)]) == 1
    found = json.loads(report.read_text(), parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert len(found["proofs"]) == 8
    assert not any(proof["passed"] for proof in found["proofs"])
    assert all(proof["figure"] is None and "not finite" in proof["detail"] for proof in found["proofs"])
    assert "causality" in capsys.readouterr().out


def test_a_memory_that_overflows_is_written_as_null(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def huge(self: MemoryModule, memory: Memory, h: Tensor, starts: Tensor | None, initial: Memory) -> tuple[Memory, Memory]:
        before, after = scan(self, memory, h, starts, initial)
        return before, after._replace(working=after.working + 1000)

    monkeypatch.setattr(MemoryModule, "scan", huge)
    report = tmp_path / "c.json"
    assert run(app, ["certify", str(checkpoint), "--segments", "8", "--json", str(report)]) == 1
    assert "Infinity" not in report.read_text()
    proofs = {proof["name"]: proof for proof in json.loads(report.read_text())["proofs"]}
    assert proofs["boundedness"]["figure"] is None
    assert not proofs["boundedness"]["passed"]
    assert "boundedness" in capsys.readouterr().err
