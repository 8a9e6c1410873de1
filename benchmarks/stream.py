"""Token-by-token decoding over a very long stream: does the millionth token cost what the thousandth did?

    python -m benchmarks.stream --preset tiny --tokens 1000000
    python -m benchmarks.stream --preset enwik8 --tokens 50000 --rounds 8

Greedy decoding, one lane, float32. At each mark the resident memory is read, then a young stream (brought to 1,000 tokens) and
the old one are timed in turns, so that the ratio does not see the machine's drift. GPT-2 of the same size with its KV cache
stands beside it.
"""

import argparse
import time
from collections.abc import Callable

import psutil
import torch
from rich.console import Console
from rich.progress import track

from benchmarks.measure import in_turns, ratio, save
from benchmarks.peers import gpt2
from lm import machine
from lm.config import load_model_config
from lm.model import PMI, State
from lm.model.proofs import draw_zeros

YOUNG = 1_000


class Stream:
    """A model decoding greedily into its own past."""

    def __init__(self, model: PMI, state: State) -> None:
        self.model, self.state, self.token = model, state, torch.zeros(state.lanes, 1, dtype=torch.long)

    def step(self, count: int) -> None:
        for _ in range(count):
            hidden, self.state = self.model(self.token, self.state, donate=True)
            self.token = self.model.head.logits(hidden).argmax(-1)


def young_stream(model: PMI) -> Stream:
    """A stream with `YOUNG` tokens behind it."""
    stream = Stream(model, model.initial_state(1))
    stream.step(YOUNG)
    return stream


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=24, help="timed blocks of one segment each, at each mark")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    machine.keep_pages()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    console = Console()
    config = load_model_config(args.preset, ["dropout=0"])
    model = draw_zeros(PMI(config)).eval()
    process = psutil.Process()
    marks, rows = sorted({10**k for k in range(4, 7) if 100 * 10**k <= args.tokens} | {args.tokens}), []
    with torch.inference_mode():
        old = young_stream(model)
        block = config.segment  # a whole segment, so that every block pays for one write

        def timed(stream: Stream) -> Callable[[], None]:
            return lambda: stream.step(block)

        resident_early = process.memory_info().rss
        position = YOUNG
        for mark in marks:
            began = time.perf_counter()
            for _ in track(range(0, mark - position, 100), f"streaming to {mark:,}", console=console):
                old.step(100)
            seconds = (time.perf_counter() - began) / max(1, mark - position)
            resident = process.memory_info().rss  # before there is a second stream
            young = young_stream(model)
            measured = in_turns({"old": timed(old), "young": timed(young)}, args.rounds)
            position = int(old.state.position)
            rows.append({
                "tokens": mark,
                "ms_per_token": 1e3 * seconds,
                "latency_over_young": ratio(measured["young"], measured["old"]),
                "resident_mb": resident / 2**20,
                "state_bytes": old.state.nbytes,
            })  # fmt: skip
            last = rows[-1]
            console.print(
                f"{mark:>9,} tokens: {last['ms_per_token']:.2f} ms/token, latency over that at {YOUNG:,} "
                f"{last['latency_over_young']}, resident {last['resident_mb']:.0f} MB, state {old.state.nbytes:,} bytes"
            )
        assert bool(old.state.memories[0].long_term.isfinite().all())
        peers = gpt2_latency(args.preset, console)
    save(f"stream_{args.preset}", {
        "protocol": f"greedy decoding, 1 lane, float32, {args.threads} thread; {args.rounds} rounds of {block} tokens in turns",
        "preset": args.preset, "resident_mb_at_1000": resident_early / 2**20, "marks": rows, "gpt2": peers,
    })  # fmt: skip


def gpt2_latency(preset: str, console: Console) -> list[dict[str, float]]:
    """Milliseconds per token of GPT-2 of the same size with a KV cache of growing length, and the cache's bytes."""
    config = load_model_config(preset)
    lengths = [1_000, 4_000, 8_000]
    peer = gpt2(config, positions=lengths[-1] + 64).eval()
    rows = []
    for length in lengths:
        cache, token = None, torch.zeros(1, 1, dtype=torch.long)
        for first in range(0, length, 500):
            cache = peer(
                torch.zeros(1, min(500, length - first), dtype=torch.long), past_key_values=cache, use_cache=True
            ).past_key_values
        began = time.perf_counter()
        for _ in range(32):
            out = peer(token, past_key_values=cache, use_cache=True)
            cache, token = out.past_key_values, out.logits[:, -1:].argmax(-1)
        seconds = (time.perf_counter() - began) / 32
        bytes_ = 2 * 4 * config.layers * config.width * length
        rows.append({"tokens": length, "ms_per_token": 1e3 * seconds, "cache_bytes": bytes_})
        console.print(f"GPT-2 with a KV cache of {length:,} tokens: {1e3 * seconds:.2f} ms/token, cache {bytes_:,} bytes")
    return rows


if __name__ == "__main__":
    main()
