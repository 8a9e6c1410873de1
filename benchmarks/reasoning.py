"""The encoders of `pmi reason`: what a layer costs, and the page of what was measured.

python -m benchmarks.reasoning                        (a layer's step against TR's, at the bAbI preset, by number of positions)
python -m benchmarks.reasoning --lengths data/babi    (how long a mixed batch of bAbI is: where those numbers come from)
python -m benchmarks.reasoning --page                 (docs/reasoning.md: its tables from benchmarks/results/reasoning*.json)

A step is forward and backward of one layer (mixing part and feed-forward, dropout on) over a batch of 64 in which half of the
positions are padding, as in a batch of stories. All contenders run in turns in one process; a figure is a layer's time over TR's.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measure import RESULTS, in_turns, ratio, save
from lm import machine
from lm.evaluation.babilong import read_questions
from lm.reasoning import report
from lm.reasoning.config import BabiData, load_reason_config
from lm.reasoning.encoder import Encoder

MODELS = ("tr", "pmi-tr", "tr-hsw")
POSITIONS = (44, 78, 132)
"""Sentences with question and class token. 78: the mean of the longest story in a batch of all 20 tasks, each in its 10k version
(the paper's); 44: with task 3 in its 1k version; 132: the longest that the preset reads."""
BATCHES = 20_000
"""Drawn to find those means."""
BOUND = 1.3
RUNS, LAYER = RESULTS / "reasoning_runs.json", RESULTS / "reasoning_layer.json"
PAGE = Path(__file__).parent.parent / "docs" / "reasoning.md"
BEGIN, END = "<!-- measured: python -m benchmarks.reasoning --page -->", "<!-- end of what was measured -->"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--page", action="store_true", help="write docs/reasoning.md's tables instead of measuring")
    parser.add_argument("--lengths", type=Path, metavar="DATA", help="draw mixed batches of bAbI instead of measuring")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.page:
        PAGE.write_text(page(PAGE.read_text()))
        return
    if args.lengths:
        lengths(args.lengths)
        return
    machine.keep_pages()
    torch.set_num_threads(args.threads)
    measure(args.rounds, args.threads)


def lengths(source: Path) -> None:
    """Print how long batches are in which all tasks are mixed, as the data are and with as much of task 3 as of the others."""
    config = load_reason_config("babi", "tr", "paper")
    assert isinstance(config.data, BabiData)
    found = read_questions(source, [f"qa{task}" for task in config.data.tasks], "train", "--lengths")
    stories = {task: np.array([min(config.data.sentences, len(q.facts)) for q in asked]) for task, asked in found.items()}
    usual = max(map(len, stories.values()))
    for name, third in (("as the data are", 1), ("task 3 as often as the others", round(usual / len(stories["qa3"])))):
        pool = np.concatenate([np.repeat(of_task, third if task == "qa3" else 1) for task, of_task in stories.items()])
        longest = np.random.default_rng(0).choice(pool, (BATCHES, config.training.batch)).max(1) + 2
        print(f"{name}, {config.training.batch} stories: positions, mean {longest.mean():.1f}, median {np.median(longest):.0f}")


def measure(rounds: int, threads: int) -> None:
    table = Table("positions", *MODELS[1:], title=f"a layer's step over TR's, bAbI preset `paper`, {threads} thread(s)")
    rows = []
    for positions in POSITIONS:
        seconds = in_turns({model: step(model, positions) for model in MODELS}, rounds)
        # `ratio` says how many times faster; here a time over TR's is wanted
        ratios = {model: ratio(seconds["tr"], seconds[model]) for model in MODELS[1:]}
        rows.append({"positions": positions, "over_tr": ratios})
        table.add_row(str(positions), *(str(value) for value in ratios.values()))
    Console().print(table)
    save("reasoning_layer", {"threads": threads, "rounds": rounds, "bound": BOUND, "rows": rows})


def step(model: str, positions: int) -> Callable[[], None]:
    """One layer's forward and backward."""
    torch.manual_seed(0)
    config = load_reason_config("babi", model, "paper", ["encoder.layers=1"])
    encoder = Encoder(config.encoder)
    batch = config.training.batch
    x = torch.randn(batch, positions, config.encoder.width, requires_grad=True)
    real = torch.arange(positions) >= torch.linspace(0, positions - 2, batch)[:, None]

    def run() -> None:
        encoder(x, real).sum().backward()
        encoder.zero_grad(set_to_none=True)
        x.grad = None

    return run


def page(text: str) -> str:
    """`text` with the tables between the marks made from the results."""
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return f"{head}{BEGIN}\n{measured()}{END}{tail}"


def measured() -> str:
    """The tables, in Markdown."""
    parts = [report.markdown(report.collect(RUNS))] if RUNS.is_file() else []
    parts.append(report.sizes("paper").markdown() + "\n")
    if LAYER.is_file():
        found = json.loads(LAYER.read_text())
        lines = [
            f"**A layer's step over TR's, bAbI preset `paper`, batch 64, {found['threads']} thread(s): median (quartiles)**",
            "",
        ]
        lines += ["| positions | " + " | ".join(MODELS[1:]) + " |", "|---" * len(MODELS) + "|"]
        for row in found["rows"]:
            cells = (f"{v['median']:.2f} ({v['low']:.2f}-{v['high']:.2f})" for v in row["over_tr"].values())
            lines.append(f"| {row['positions']} | " + " | ".join(cells) + " |")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    main()
