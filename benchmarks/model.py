"""Training speed of the model: memory on against memory off, and against peers of the same size.

    make bench-model                                   (all presets and thread counts)
    python -m benchmarks.model --preset small --threads 1
    python -m benchmarks.model --preset enwik8 --only '1 in 4, probe, both levels'      (with memory off and the peers)

One forward and backward over lanes x K segments, float32, no dropout, state carried. All contenders run in turns in one process;
a ratio is tokens/s over the reference's in the same round: median and quartiles. Rows of contenders that a run leaves out stay as
they were measured before.
"""

import argparse
import json
from collections.abc import Callable

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import RESULTS, in_turns, ratio, save
from benchmarks.peers import gpt2, transformer_xl, transformer_xl_loss
from lm import machine
from lm.config import load_model_config
from lm.model import PMI

LAYER = ["memory.scope=layer", "memory.parameters=separate", "memory.correction=false"]
PAPER = [
    "memory.scope=global",
    "memory.parameters=tied",
    "memory.layers=all",
    "memory.correction=true",
    "memory.consolidation=probe",
]
PAPER += ["memory.slots=8", "memory.fragments=5", "memory.top_k=5", "memory.mlp_layers=4", "memory.gate=unit"]
# one memory layer in four; `small` has 6 layers, so its literal 'one in four' is measured with 4 of them
SIZES = {
    "small": {"lanes": 16, "segments": 4, "base": [], "quarter": ["memory.layers=[1]", "layers=4"], "quarter_base": ["layers=4"]},
    "enwik8": {"lanes": 2, "segments": 2, "base": [], "quarter": ["memory.layers=[2,5,9]"], "quarter_base": []},
}


def contenders(preset: str) -> dict[str, tuple[str, list[str]]]:
    """Name -> (its reference, overrides)."""
    size = SIZES[preset]
    quarter = [*LAYER, *size["quarter"]]
    found = {
        "off": ("off", ["memory=off"]),
        "paper": ("off", PAPER),
        "paper without correction": ("off", [*PAPER, "memory.correction=false"]),
        "paper, own memory per layer": ("off", [*PAPER, "memory.scope=layer", "memory.parameters=separate"]),
    }
    reference = "off"
    if size["quarter_base"]:
        reference = "off, 4 layers"
        found[reference] = (reference, ["memory=off", *size["quarter_base"]])
    found["1 in 4, delta, both levels"] = (reference, [*quarter, "memory.consolidation=delta"])
    found["1 in 4, delta, long-term only"] = (reference, [*quarter, "memory.consolidation=delta", "memory.read=long_term"])
    found["1 in 4, probe, both levels"] = (reference, [*quarter, "memory.consolidation=probe"])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=list(SIZES), action="append")
    parser.add_argument("--threads", type=int, action="append")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument(
        "--only",
        action="append",
        choices=list(contenders("small")),
        help="measured beside memory off and the peers (default: all)",
    )
    args = parser.parse_args()
    machine.keep_pages()
    for preset in args.preset or list(SIZES):
        for threads in args.threads or [1, 2]:
            measure(preset, threads, args.rounds, args.only)


def measure(preset: str, threads: int, rounds: int, only: list[str] | None) -> None:
    torch.set_num_threads(threads)
    size, console = SIZES[preset], Console()
    lanes, segments = size["lanes"], size["segments"]
    config = load_model_config(preset, ["memory=off", "dropout=0"])
    tokens = torch.randint(0, config.vocab_size, (lanes, segments * config.segment + 1))
    everything = contenders(preset)
    named = {name: found for name, found in everything.items() if only is None or name in only or name == found[0]}
    steps: dict[str, Callable[[], None]] = {}
    for name, (_, overrides) in named.items():
        torch.manual_seed(0)
        steps[name] = step_of(PMI(load_model_config(preset, [*overrides, "dropout=0"])), tokens)
    steps["x-transformers XL"] = _xl(transformer_xl(config), tokens, config.segment)
    steps["GPT-2"] = _gpt2(gpt2(config, config.segment + config.window), tokens, config.segment + config.window)
    seconds = in_turns(steps, rounds, warmup=1)
    count = lanes * segments * config.segment
    table = Table("contender", "tokens/s", "over memory off", "over x-transformers XL", "over GPT-2",
                  title=f"{preset}, {threads} thread(s): {lanes} x {segments} x {config.segment} tokens")  # fmt: skip
    rows = []
    for name, taken in seconds.items():
        reference = named[name][0] if name in named else "off"
        smaller = "4 layers" in reference
        row = {
            "contender": name,
            "tokens_per_second": count / sorted(taken)[len(taken) // 2],
            "reference": reference,
            "over_off": ratio(taken, seconds[reference]),
            "over_xl": None if smaller else ratio(taken, seconds["x-transformers XL"]),
            "over_gpt2": None if smaller else ratio(taken, seconds["GPT-2"]),
        }
        rows.append(row)
        cells = [str(row[key]) if row[key] else "" for key in ("over_off", "over_xl", "over_gpt2")]
        table.add_row(name, f"{row['tokens_per_second']:,.0f}", *cells)
    console.print(table)
    path = RESULTS / f"model_{preset}_{threads}.json"
    before = json.loads(path.read_text())["rows"] if only and path.is_file() else []
    known = {row["contender"]: row for row in [*before, *rows]}
    kept = [known[name] for name in dict.fromkeys([*everything, *steps]) if name in known]
    save(path.stem, {"preset": preset, "threads": threads, "tokens": count, "rows": kept})


def step_of(model: PMI, tokens: torch.Tensor, bf16: bool = False) -> Callable[[], None]:
    """One step's forward and backward (under autocast: `bf16`), behind a full window, as in the middle of a document."""
    with torch.no_grad():
        state = model(tokens[:, :-1], model.initial_state(tokens.shape[0]))[1]

    def step() -> None:
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=bf16):
            hidden, _ = model(tokens[:, :-1], state)
            loss = model.head.loss(hidden, tokens[:, 1:])
        loss.backward()
        model.zero_grad(set_to_none=True)

    return step


def _xl(model: torch.nn.Module, tokens: torch.Tensor, segment: int) -> Callable[[], None]:
    with torch.no_grad():
        memory = transformer_xl_loss(model, tokens, segment)[1]  # a full window for it too

    def step() -> None:
        transformer_xl_loss(model, tokens, segment, memory)[0].backward()
        model.zero_grad(set_to_none=True)

    return step


def _gpt2(model: torch.nn.Module, tokens: torch.Tensor, context: int) -> Callable[[], None]:
    inputs = tokens[:, :-1].reshape(-1, context)
    targets = tokens[:, 1:].reshape(-1, context)

    def step() -> None:
        logits = model(inputs, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum").backward()
        model.zero_grad(set_to_none=True)

    return step


if __name__ == "__main__":
    main()
