"""What the memory costs in training: tokens/s of a preset with its memory over those without, in turns in one process.

python -m benchmarks.memory.cost --preset pg19-memory
python -m benchmarks.memory.cost --preset small --set memory.layers=[5] --set memory.read=long_term ...
"""

import argparse

import torch

from benchmarks.measure import in_turns, ratio, save
from benchmarks.model import step_of
from lm import machine
from lm.config import load_model_config
from lm.model import PMI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="pg19-memory")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change a key of the preset, with memory")
    parser.add_argument("--lanes", type=int, default=8)
    parser.add_argument("--segments", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32", help="bf16: autocast, as in training")
    args = parser.parse_args()
    machine.keep_pages()
    torch.set_num_threads(args.threads)
    on = load_model_config(args.preset, [*args.set, "dropout=0"])
    off = load_model_config(args.preset, ["memory=off", "dropout=0"])
    tokens = torch.randint(0, on.vocab_size, (args.lanes, args.segments * on.segment + 1))
    bf16 = args.precision == "bf16"
    seconds = in_turns({"on": step_of(PMI(on), tokens, bf16), "off": step_of(PMI(off), tokens, bf16)}, args.rounds)
    found = ratio(seconds["on"], seconds["off"])
    print(f"{args.preset} {' '.join(args.set)}: memory on over off {found}, {args.threads} thread(s)")
    about = {"preset": args.preset, "changes": args.set, "precision": args.precision, "threads": args.threads}
    about |= {"lanes": args.lanes, "segments": args.segments}
    save(f"memory_cost_{args.preset}_{args.precision}", {**about, "ratio": found})


if __name__ == "__main__":
    main()
