"""A GPT-2 of the same size, trained on the same tokens in the same order: the first peer of `pmi eval-peer`.

    python -m benchmarks.train_gpt2 --preset tiny --data runs/demo/data --steps 330 --out runs/gpt2
    pmi eval-peer --model runs/gpt2 --data runs/demo/data --context 128 --stride 64

It reads what `pmi demo` reads: the same lanes, segments per step, optimiser, schedule (the defaults). Each row of a batch is
a stretch of one lane, `segments x segment` tokens: GPT-2 sees no more than these, and has as many positions.
"""

import argparse
import math
from pathlib import Path

import torch
from rich.progress import track
from torch.nn import functional as F

from benchmarks.peers import gpt2
from lm import machine
from lm.config import OptimiserConfig, load_model_config
from lm.data.lanes import Lanes
from lm.data.prepared import open_prepared
from lm.training.loop import learning_rate, optimiser_for


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny", help="the model whose sizes it takes")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the preset")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=330)
    parser.add_argument("--lanes", type=int, default=16)
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.003)
    parser.add_argument("--warmup", type=int, default=20)
    parser.add_argument("--weight-decay", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    machine.keep_pages()
    data = open_prepared(args.data)
    config = load_model_config(args.preset, [f"vocab_size={data.tokenizer.vocab_size}", *args.set])
    torch.manual_seed(args.seed)
    model = gpt2(config, positions=args.segments * config.segment)
    model.config.bos_token_id = model.config.eos_token_id = data.tokenizer.bos
    settings = OptimiserConfig(lr=args.lr, warmup=args.warmup, weight_decay=args.weight_decay)
    optimiser = optimiser_for(model, settings)
    lanes = Lanes(data, "train", lanes=args.lanes, segment=config.segment, seed=args.seed)
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, {args.segments * config.segment} positions")
    for step in track(range(args.steps), "training"):
        batch = lanes.next_batch(args.segments)
        logits = model(batch.tokens).logits
        loss = F.cross_entropy(logits[batch.mask()], batch.targets[batch.mask()])
        optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        for group in optimiser.param_groups:
            group["lr"] = learning_rate(settings, step, args.steps)
        optimiser.step()
        if (step + 1) % max(1, args.steps // 10) == 0:
            print(f"step {step + 1}/{args.steps}  {float(loss) / math.log(2):.3f} bits per token")
    model.save_pretrained(args.out)
    data.tokenizer.save(args.out)
    print(f"saved {args.out}")


if __name__ == "__main__":
    main()
