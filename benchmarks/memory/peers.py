"""Other people's models on the same text: trained on the same tokens in the same order, read over the same documents.

    python -m benchmarks.memory.peers --peer xl --data data/pg19-2k --seed 0 --out runs/memory/pg19-2k-600/xl-0

xl      x-transformers' decoder with Transformer-XL recurrence: our segment and window; the window is carried on
gpt2    Hugging Face GPT-2: rows of `segments x segment` tokens; evaluated in windows of that length that overlap by half
rwkv    Hugging Face RWKV-4: trained on the same rows; its state is carried on through a document

Same layers, width, heads and feed-forward width as the preset with memory off; same optimiser, schedule and precision as `pmi
train`; read in the type of `--dtype`.
Writes OUT/outcomes.json: the loss of every document of the split.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.peers import gpt2, rwkv, transformer_xl
from lm import machine
from lm.config import ModelConfig, TrainingConfig, load_run_config
from lm.data.lanes import Batch, Lanes
from lm.data.prepared import open_prepared
from lm.evaluation.corpus import Item, open_corpus
from lm.evaluation.peer import Peer, evaluate_peer
from lm.evaluation.stream import Watch
from lm.evaluation.tally import Outcome, Tally
from lm.training.loop import learning_rate, optimiser_for
from lm.training.trainer import checked_model

Carried = Any
Reader = Callable[[Tensor, Carried], tuple[Tensor, Carried]]
"""Tokens [b, t] and what is carried to logits and what is carried on."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", choices=["xl", "gpt2", "rwkv"], required=True)
    parser.add_argument(
        "--config", type=Path, default=Path("configs/train/pg19-memory.yaml"), help="whose sizes and settings it takes"
    )
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--split", default="test")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32", help="bfloat16: read under autocast")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    machine.keep_pages()
    changes = [f"data={args.data}", f"seed={args.seed}", f"training.steps={args.steps}", "model.memory=off"]
    run = load_run_config(args.config, changes)
    data = open_prepared(args.data)
    config, training = checked_model(run, data), run.training
    row = training.segments * config.segment
    torch.manual_seed(args.seed)
    model = {"xl": transformer_xl, "gpt2": lambda c: gpt2(c, row), "rwkv": lambda c: rwkv(c, row)}[args.peer](config)
    lanes = Lanes(data, "train", lanes=training.lanes, segment=config.segment, seed=args.seed)
    began = time.process_time()
    train(args.peer, model, config, lanes, training, args.steps)
    seconds = time.process_time() - began
    corpus = open_corpus(args.data, args.split, data.tokenizer, None)
    model.eval()
    with torch.autocast("cpu", torch.bfloat16, enabled=args.dtype == "bfloat16"):
        if args.peer == "gpt2":
            outcomes: list[Outcome] = []
            peer = Peer(model, "gpt2", None, data.tokenizer, data.tokenizer.bos, row)
            evaluate_peer(peer, corpus.items, row, row // 2, Watch(done=outcomes.append))
        else:
            reader = xl_reader(model) if args.peer == "xl" else rwkv_reader(model)
            outcomes = read(reader, corpus.items, config.segment, data.tokenizer.bos)
    args.out.mkdir(parents=True, exist_ok=True)
    about = {
        "peer": args.peer, "parameters": sum(p.numel() for p in model.parameters()), "training_seconds": seconds,
        "outcomes": [outcome.row() for outcome in outcomes],
    }  # fmt: skip
    (args.out / "outcomes.json").write_text(json.dumps(about))
    nats = sum(x.nats for x in outcomes) / sum(x.tokens for x in outcomes)
    print(f"{args.out}: {about['parameters']:,} parameters, {nats:.4f} nats per token, {seconds:.0f} s of one core for training")


def train(peer: str, model: nn.Module, config: ModelConfig, lanes: Lanes, training: TrainingConfig, steps: int) -> None:
    """As `pmi train` does: AdamW, warm-up and cosine, clipped gradients, mean over the real tokens of a batch."""
    settings = training.optimiser
    optimiser = optimiser_for(model, settings)  # type: ignore[arg-type]
    carried: Carried = None
    model.train()
    for step in track(range(steps), "training"):
        batch = lanes.next_batch(training.segments)
        with torch.autocast("cpu", torch.bfloat16, enabled=training.precision == "bf16"):
            if peer == "xl":
                loss, carried = xl_loss(model, batch, config.segment, carried)
            else:
                mask = batch.mask()
                loss = F.cross_entropy(model(batch.tokens).logits[mask], batch.targets[mask])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(settings, step, steps)
        optimiser.step()
        if (step + 1) % 100 == 0:
            print(f"step {step + 1}/{steps}  {float(loss):.3f} nats per token", flush=True)


def xl_loss(model: nn.Module, batch: Batch, segment: int, carried: Carried) -> tuple[Tensor, Carried]:
    """Segment by segment behind the carried window; where a document starts, what was carried is set to zero."""
    total, mask = torch.zeros(()), batch.mask()
    for s, first in enumerate(range(0, batch.tokens.shape[1], segment)):
        if carried is not None:
            keep = (~batch.starts[:, s]).float()[:, None, None]
            carried = [x * keep for x in carried]
        logits, carried = model(batch.tokens[:, first : first + segment], mems=carried, return_mems=True)
        own = mask[:, first : first + segment]
        total = total + F.cross_entropy(logits[own], batch.targets[:, first : first + segment][own], reduction="sum")
    return total / mask.sum(), [x.detach() for x in carried]


def xl_reader(model: nn.Module) -> Reader:
    """Its window is carried."""
    return lambda tokens, carried: model(tokens, mems=carried, return_mems=True)


def rwkv_reader(model: nn.Module) -> Reader:
    """Its state is carried."""

    def read_on(tokens: Tensor, carried: Carried) -> tuple[Tensor, Carried]:
        found = model(tokens, state=carried, use_cache=True)
        return found.logits, found.state

    return read_on


@torch.inference_mode()
def read(reader: Reader, items: list[Item], segment: int, bos: int) -> list[Outcome]:
    """All documents side by side from their starts, a segment at a time; a document that has ended reads on into padding."""
    tallies = [Tally(item, segment) for item in items]
    carried: Carried = None
    for s in track(range(max(len(tally.segments) for tally in tallies)), "reading"):
        alive = [i for i, tally in enumerate(tallies) if tally.left]
        tokens = np.full((len(items), segment + 1), bos, dtype=np.int64)
        for i in alive:
            first, last = s * segment, min((s + 1) * segment, items[i].length)
            own = items[i].read(max(0, first - 1), last)
            tokens[i, int(first == 0) : int(first == 0) + len(own)] = own
        given = torch.from_numpy(tokens)
        logits, carried = reader(given[:, :-1], carried)
        losses = F.cross_entropy(logits.float().transpose(1, 2), given[:, 1:], reduction="none").double().numpy()
        for i in alive:
            real = min(segment, items[i].length - s * segment)
            tallies[i].add(losses[i, :real].sum(keepdims=True), losses[i, :real])
    return [tally.outcome() for tally in tallies]


if __name__ == "__main__":
    main()
