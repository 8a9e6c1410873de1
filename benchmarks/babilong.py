"""The session path against the model itself: reading a BABILong sample of a million tokens, over forward-only tokens per second.

    python -m benchmarks.babilong --facts babi_en-valid-10k.tar.xz --text test.tar.xz --preset tiny --tokens 1000000

Both read stretches of the same length in turns: the session path a sample from disk, in calls of 16 segments, with state carried,
ending with a greedy answer; the model alone random ids in memory, in calls of the same size, state carried, logits of nothing.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path

import psutil
import torch
from rich.console import Console

from benchmarks.measure import in_turns, ratio, save
from lm import machine
from lm.config import load_model_config
from lm.data.tokenizer import ByteTokenizer
from lm.evaluation.babilong_eval import generate, read_streams
from lm.evaluation.babilong_tasks import Tasks, make
from lm.model import PMI
from lm.model.proofs import draw_zeros


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=12, help="stretches that the sample is read in")
    parser.add_argument("--segments", type=int, default=16, help="segments of a call")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    machine.keep_pages()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    console = Console()
    model = draw_zeros(PMI(load_model_config(args.preset, ["dropout=0"]))).eval()
    tokenizer, process = ByteTokenizer(), psutil.Process()
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        out, length = Path(folder), str(args.tokens)
        make(args.facts, args.text, ["qa1"], [length], 1, 0, "test", tokenizer, out, console)
        (sample,) = Tasks(out).samples("qa1", length)
        call = args.segments * model.config.segment
        calls = -(-(1 + sample.tokens) // call)
        stretch = calls // (args.rounds + 1)
        stream = read_streams(model, [sample], tokenizer.bos, call)
        ids = torch.randint(256, (1, call))
        carried = [model.initial_state(1)]
        resident: list[float] = []

        def session() -> None:
            for _ in range(stretch):
                _, state, last = next(stream)
            generate(model, state, last, len(tokenizer.encode("bathroom\n")))
            resident.append(process.memory_info().rss / 2**20)

        def forward() -> None:
            for _ in range(stretch):
                _, carried[0] = model(ids, carried[0])

        contenders: dict[str, Callable[[], None]] = {"session": session, "forward": forward}
        seconds = in_turns(contenders, args.rounds, warmup=1)
    result = ratio(seconds["session"], seconds["forward"])
    console.print(
        f"{args.preset}: session path over forward only {result}; resident {resident[0]:.0f} MB at the start, "
        f"{resident[-1]:.0f} MB after {stretch * call * len(resident):,} tokens"
    )
    save(f"babilong_{args.preset}", {
        "protocol": f"one BABILong sample of {args.tokens:,} byte tokens, 1 lane, float32, {args.threads} thread, calls of "
        f"{args.segments} segments; {args.rounds} stretches of {stretch * call:,} tokens, in turns; an answer after each stretch",
        "preset": args.preset, "session_over_forward": result, "resident_mb": resident,
    })  # fmt: skip


if __name__ == "__main__":
    main()
