"""How a result is shown: a table, one line for a paper, and the picture of loss by position."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lm.evaluation.figures import Figures
from lm.evaluation.job import Result

FEW = 10
"""Documents or blocks below which a bootstrap interval is too narrow to be trusted."""
ROWS: dict[str, Callable[[Figures], str]] = {
    "nats per token": lambda x: f"{x.nats_per_token:.4f}",
    "95 % of it": lambda x: f"{x.interval.low:.4f} to {x.interval.high:.4f}" if x.interval else "-",
    "bits per token": lambda x: f"{x.bits_per_token:.4f}",
    "token perplexity": lambda x: _number(x.perplexity),
    "word perplexity": lambda x: _number(x.word_perplexity),
    "bits per byte": lambda x: _bits(x.bits_per_byte),
    "bits per char": lambda x: _bits(x.bits_per_character),
    "tokens": lambda x: f"{x.tokens:,}",
    "seconds": lambda x: f"{x.seconds:.1f}",
    "tokens per second": lambda x: f"{x.tokens_per_second:,.0f}",
}


def show(result: Result, console: Console) -> None:
    """Print everything, the protocol beside the numbers."""
    protocol = result.protocol
    title = f"{protocol['data']}: {protocol['tokens']:,} tokens, {protocol['documents']:,} documents"
    table = Table("memory", title=title, title_justify="left")
    for name in result.figures:
        table.add_column(name, justify="right")
    for label, shown in ROWS.items():
        cells = [shown(found) for found in result.figures.values()]
        if any(cell != "-" for cell in cells):
            table.add_row(label, *cells)
    console.print(table)
    for line in remarks(result):
        console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    for name in result.figures:
        console.print(paper_line(result, name), markup=False, highlight=False, soft_wrap=True)


def remarks(result: Result) -> list[str]:
    """What must be said beside the table."""
    protocol = result.protocol
    lines = [
        f"{protocol['prediction']}; T={protocol['segment']}, W={protocol['window']}, {protocol['dtype']}, sums in float64",
        *(f"memory {name}: {meaning}; {protocol['streams'][name]}" for name, meaning in protocol["modes"].items()),
    ]
    found = next(iter(result.figures.values()))
    if found.interval:
        few = "; so few that it is a hint at most" if found.interval.units < FEW else ""
        lines.append(f"95 %: bootstrap over {found.interval.units:,} {found.interval.over}{few}")
    if found.word_perplexity is not None:
        lines.append(f"word ppl: by {protocol['words_are']}")
    if protocol["unknown_rate"] is not None:
        lines.append(f"unknown tokens: {protocol['unknown_rate']:.2%} of all; each is as easy to predict as one word")
    if protocol["not_comparable"]:
        lines.append(f"NOT comparable with published figures: {'; '.join(protocol['not_comparable'])}")
    lines += result.notes
    if result.shuffling is not None:
        lines.append(_said(result.shuffling))
    quiet = result.leak_alarm
    if quiet.quiet and quiet.documents:
        across = f", {quiet.across} first segments of the run agree between its modes" if quiet.across else ""
        lines.append(f"leak alarm quiet: {quiet.documents} first segments equal bit for bit with on, reset, shuffled{across}")
    lines += [f"LEAK ALARM: {leak}" for leak in quiet.leaks[:5]]
    return lines


def _said(shuffling: dict[str, Any]) -> str:
    gap = f"{shuffling['nats_per_token']:+.5f} nats/token"
    if shuffling["low"] is not None:
        gap += f" (95 % {shuffling['low']:+.5f} to {shuffling['high']:+.5f}, {shuffling['units']} {shuffling['over']})"
    verdicts = {
        True: "is worse: the memory carries something of its own document",
        False: "is better, which no sound memory does: look for a fault",
        None: "is not surely different: this run does not show that the memory carries anything",
    }
    return f"shuffled memory against {shuffling['against']}: {gap}; it {verdicts[shuffling['worse']]}"


def paper_line(result: Result, name: str) -> str:
    """One line to paste: the figure with its protocol."""
    protocol, found = result.protocol, result.figures[name]
    parts = [headline(found, protocol), f"memory {name} ({protocol['modes'][name]})"]
    trained = protocol["trained_with"]
    sizes = f"T={protocol['segment']}, W={protocol['window']}"
    if trained != {"segment": protocol["segment"], "window": protocol["window"]}:
        sizes += f" (trained with T={trained['segment']}, W={trained['window']})"
    parts += [protocol["streams"][name], sizes, protocol["prediction"], protocol["dtype"]]
    if protocol["unknown_rate"] is not None:
        parts.append(f"{protocol['unknown_rate']:.2%} unknown")
    parts.append(f"model {protocol['model']}, tokenizer {protocol['tokenizer']}, data {protocol['data_fingerprint']}")
    if not protocol["comparable"]:
        parts.append(f"not comparable with published figures: {'; '.join(protocol['not_comparable'])}")
    return f"{protocol['data']} ({protocol['tokens']:,} tokens): " + " · ".join(parts)


def headline(found: Figures, protocol: dict[str, Any]) -> str:
    """The figure by which a data set is known, with its interval."""
    low, high = (found.interval.low, found.interval.high) if found.interval else (math.nan, math.nan)
    if protocol["tokenizer"].startswith("bytes "):
        value, scale, unit = found.bits_per_token, 1 / math.log(2), "bits per byte"
        ends = [f"{x * scale:.4f}" for x in (low, high)]
        shown = f"{value:.4f}"
    else:
        words = found.word_perplexity is not None
        ratio = math.log(found.word_perplexity) / found.nats_per_token if found.word_perplexity and found.nats_per_token else 1.0
        shown = _number(found.word_perplexity if words else found.perplexity)
        unit = "word-level perplexity" if words else "token perplexity"
        ends = [_number(math.exp(min(x * ratio, 690))) for x in (low, high)]
    return f"{shown} {unit}" + (f" [{ends[0]}, {ends[1]}]" if found.interval else "")


def draw(result: Result, path: Path) -> None:
    """Loss by position in the document, a curve for each memory mode."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(8, 4.8))
    protocol = result.protocol
    for name, bins in result.positions.items():
        centres = [math.sqrt(max(bin_["first"], 0.5) * bin_["last"]) for bin_ in bins]
        axis.plot(centres, [bin_["nats_per_token"] / math.log(2) for bin_ in bins], "o-", markersize=3, label=f"memory {name}")
    axis.axvline(protocol["segment"], color="grey", linestyle=":", linewidth=1)
    axis.text(
        protocol["segment"],
        0.99,
        " memory is first read",
        transform=axis.get_xaxis_transform(),
        va="top",
        fontsize=8,
        color="grey",
    )
    axis.set_xscale("log")
    axis.set_xlabel("position in the document (tokens)")
    axis.set_ylabel("bits per token")
    axis.set_title(
        f"{protocol['data']}: {protocol['tokens']:,} tokens, T={protocol['segment']}, W={protocol['window']}", fontsize=10
    )
    axis.grid(alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1e4 else f"{value:.3g}"


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
