"""`pmi demo`: train a small byte model on the bundled text, save it, and generate from it. What `make run` does."""

from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor

from lm import machine
from lm.config import DemoConfig, load_config, load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.generation.sample import stream
from lm.model import PMI
from lm.model.pretrained import Checkpoint, fingerprint, save_pretrained
from lm.training.loop import Batch, Step, train

NATS_PER_BIT = 0.6931471805599453


def bundled_text() -> bytes:
    """The public-domain text in the package (see lm/data/text/README.md)."""
    return (resources.files("lm.data") / "text" / "moby-dick.txt").read_bytes()


def text_batches(text: bytes, bos: int, lanes: int, segments: int, segment: int) -> Iterator[Batch]:
    """The text in `lanes` contiguous parts, each read as one document over and over, `segments` segments a step."""
    part = len(text) // lanes // segment * segment
    ids = torch.frombuffer(bytearray(text[: part * lanes]), dtype=torch.uint8).long().view(lanes, part)
    inputs = torch.cat([torch.full((lanes, 1), bos), ids[:, :-1]], 1).view(lanes, -1, segment)
    targets = ids.view(lanes, -1, segment)
    count, at = part // segment, 0
    while True:
        chosen = torch.arange(at, at + segments) % count
        starts = (chosen == 0).expand(lanes, -1)
        at += segments
        yield Batch(
            inputs[:, chosen].flatten(1), targets[:, chosen].flatten(1), torch.ones(lanes, segments * segment).bool(), starts
        )


@torch.no_grad()
def bits_per_byte(model: PMI, text: bytes, bos: int) -> float:
    """Bits per byte of a held-out text, read once with carried memory."""
    ids = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()[None]
    inputs: Tensor = torch.cat([torch.tensor([[bos]]), ids[:, :-1]], 1)
    hidden, _ = model(inputs, model.initial_state(1))
    return float(model.head.loss(hidden, ids)) / ids.shape[1] / NATS_PER_BIT


def run(out: Path, steps: int | None, device: torch.device, console: Console) -> Checkpoint:
    """Train, measure, save to `out/model`, and show a sample."""
    machine.keep_pages()
    config = load_config(DemoConfig, "train/demo")
    steps = steps or config.steps
    tokenizer = ByteTokenizer()
    torch.manual_seed(config.seed)
    model = PMI(load_model_config(config.model, config.overrides)).to(device)
    text = bundled_text()
    held_out, text = text[-config.held_out :], text[: -config.held_out]
    batches = text_batches(text, tokenizer.bos, config.lanes, config.segments, model.config.segment)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"training {parameters:,} parameters on {len(text):,} bytes of Moby-Dick, {steps} steps of "
        f"{config.lanes} lanes x {config.segments} segments x {model.config.segment} bytes"
    )
    columns = (
        TextColumn("[progress.description]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps)

        def report(step: Step) -> None:
            bits = step.loss / NATS_PER_BIT
            progress.update(task, advance=1, description=f"{bits:.3f} bits/byte")
            if not console.is_terminal and (step.number + 1) % max(1, steps // 10) == 0:
                console.print(f"step {step.number + 1}/{steps}  {bits:.3f} bits/byte")

        train(model, batches, config.optimiser, steps, report)
    model.eval()
    console.print(
        f"held-out text: {bits_per_byte(model, held_out, tokenizer.bos):.3f} bits per byte "
        f"({len(held_out):,} bytes read once, memory carried)"
    )
    folder = out / "model"
    save_pretrained(model, tokenizer, folder)
    console.print(f"saved {folder}")
    checkpoint = Checkpoint(model, tokenizer, fingerprint(model))
    console.rule("a sample")
    console.print(config.prompt, end="", style="bold", markup=False, highlight=False)
    for piece in stream(checkpoint, config.prompt, tokens=400, temperature=0.7, top_k=None, seed=config.seed):
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.rule()
    console.print(f"more: pmi generate --checkpoint {folder} --prompt 'The whale'", markup=False)
    return checkpoint
