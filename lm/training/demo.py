"""`pmi demo`: prepare the bundled text, train a small byte model on it, save it, and generate from it. What `make run` does."""

import math
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lm import machine
from lm.config import DemoConfig, load_model_config
from lm.config_files import load_config
from lm.data.lanes import Lanes
from lm.data.prepare import Request, prepare
from lm.data.prepared import Prepared, open_prepared
from lm.generation.sampling import Sampling
from lm.generation.stream import stream
from lm.model import PMI
from lm.model.pretrained import Checkpoint, fingerprint, save_pretrained
from lm.training.loop import Batch, Step, train


def bundled_text() -> Path:
    """The public-domain text in the package (see lm/data/text/README.md)."""
    return Path(str(resources.files("lm.data") / "text" / "moby-dick.txt"))


def batches(data: Prepared, config: DemoConfig, segment: int) -> Iterator[Batch]:
    """The training split in lanes, without end."""
    lanes = Lanes(data, "train", lanes=config.lanes, segment=segment, seed=config.seed)
    while True:
        batch = lanes.next_batch(config.segments)
        yield Batch(batch.tokens, batch.targets, batch.mask(), batch.starts)


@torch.no_grad()
def bits_per_byte(model: PMI, data: Prepared, split: str) -> float:
    """Bits per byte of a split, each document read once with carried memory."""
    nats, count = 0.0, 0
    for document in data.documents(split):
        targets = torch.from_numpy(document.tokens().astype("int64"))[None].to(model.device)
        inputs = torch.cat([torch.full_like(targets[:, :1], data.tokenizer.bos), targets[:, :-1]], 1)
        hidden, _ = model(inputs, model.initial_state(1))
        nats, count = nats + float(model.head.loss(hidden, targets)), count + document.bytes
    return nats / count / math.log(2)


def run(out: Path, steps: int | None, device: torch.device, console: Console) -> Checkpoint:
    """Prepare, train, measure, save to `out/model`, and show a sample."""
    machine.keep_pages()
    config = load_config(DemoConfig, "train/demo")
    steps = steps or config.steps
    prepare(Request("text", out / "data", bundled_text(), "bytes", holdout=config.holdout, processes=1), force=True)
    data = open_prepared(out / "data")
    torch.manual_seed(config.seed)
    model = PMI(load_model_config(config.model, config.overrides)).to(device)
    parameters = sum(p.numel() for p in model.parameters())
    console.print(
        f"training {parameters:,} parameters on {data.split('train').lengths.sum():,} bytes of Moby-Dick: "
        f"{steps} steps of {config.lanes} lanes x {config.segments} segments x {model.config.segment} bytes",
        soft_wrap=True,
    )
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("training", total=steps)

        def report(step: Step) -> None:
            bits = step.loss / math.log(2)
            progress.update(task, advance=1, description=f"{bits:.3f} bits/byte")
            if not console.is_terminal and (step.number + 1) % max(1, steps // 10) == 0:
                console.print(f"step {step.number + 1}/{steps}  {bits:.3f} bits/byte")

        train(model, batches(data, config, model.config.segment), config.optimiser, steps, report)
    model.eval()
    held_out = data.split("validation")
    bits = bits_per_byte(model, data, "validation")
    console.print(f"held-out text: {bits:.3f} bits per byte ({held_out.lengths.sum():,} bytes read once, memory carried)")
    folder = out / "model"
    save_pretrained(model, data.tokenizer, folder)
    console.print(f"saved {folder}")
    checkpoint = Checkpoint(model, data.tokenizer, fingerprint(model))
    console.rule("a sample")
    console.print(config.prompt, end="", style="bold", markup=False, highlight=False)
    for piece in stream(checkpoint, config.prompt, tokens=400, sampling=Sampling(temperature=0.7, seed=config.seed)):
        console.print(piece, end="", markup=False, highlight=False, soft_wrap=True)
    console.print()
    console.rule()
    console.print(f"more: pmi generate --checkpoint {folder} --prompt 'The whale'", markup=False, soft_wrap=True)
    return checkpoint
