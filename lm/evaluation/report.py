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
    "  95 % from": lambda x: f"{x.interval.low:.4f}" if x.interval else "-",
    "  95 % to": lambda x: f"{x.interval.high:.4f}" if x.interval else "-",
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
    title = f"{protocol['data']}: {protocol['tokens']:,} tokens, {counted(protocol['documents'])}"
    table = Table("memory")
    for name in result.figures:
        table.add_column(name, justify="right")
    for label, shown in ROWS.items():
        cells = [shown(found) for found in result.figures.values()]
        if any(cell != "-" for cell in cells):
            table.add_row(label, *cells)
    console.print(title, markup=False, highlight=False, soft_wrap=True)  # as a table's title it would be cut to its width
    console.print(table)
    for line in remarks(result):
        console.print(f"- {line}", markup=False, highlight=False, soft_wrap=True)
    console.print()
    for name in result.figures:
        console.print(paper_line(result, name), markup=False, highlight=False, soft_wrap=True)


def counted(documents: int) -> str:
    """So many documents, in words."""
    return f"{documents:,} document{'' if documents == 1 else 's'}"


def remarks(result: Result) -> list[str]:
    """What must be said beside the table."""
    protocol = result.protocol
    lines = [
        f"{protocol['prediction']}; T={protocol['segment']}, W={protocol['window']}, {protocol['dtype']}, sums in float64",
        *(f"memory {name}: {meaning}; {protocol['streams'][name]}" for name, meaning in protocol["modes"].items()),
    ]
    found = next(iter(result.figures.values()))
    for units, over in dict.fromkeys((x.interval.units, x.interval.over) for x in result.figures.values() if x.interval):
        few = "; so few that it is a hint at most" if units < FEW else ""
        lines.append(f"95 %: bootstrap over {units:,} {over}{few}")
    if found.word_perplexity is not None:
        lines.append(f"word ppl: by {protocol['words_are']}")
    if protocol["unknown_rate"] is not None:
        lines.append(f"unknown tokens: {protocol['unknown_rate']:.2%} of all; each is as easy to predict as one word")
    if protocol["not_comparable"]:
        lines.append(f"NOT comparable with published figures: {'; '.join(protocol['not_comparable'])}")
    lines += result.notes
    lines += [_said(name, gap) for name, gap in result.differences.items()]
    quiet = result.leak_alarm
    if quiet.quiet and quiet.documents:
        lines.append(
            f"leak alarm quiet: {quiet.documents} first segments equal bit for bit with on, reset, shuffled, behind another "
            f"document as alone; {quiet.across} comparisons with those of the run agree"
        )
    lines += [f"LEAK ALARM: {leak}" for leak in quiet.leaks[:5]]
    return lines


def verdict(difference: dict[str, Any]) -> str:
    """A paired difference in words: how much, how sure, which way."""
    gap = f"{difference['nats_per_token']:+.5f} nats/token"
    if difference["low"] is not None:
        gap += (
            f" (95 % {difference['low']:+.5f} to {difference['high']:+.5f}, {difference['units']} {difference['over']} in pairs)"
        )
    else:
        gap += " (no interval: nothing to resample)"
    verdicts = {True: "worse", False: "better", None: "not surely different"}
    return f"{gap}, {verdicts[difference['worse']]}"


def _said(name: str, difference: dict[str, Any]) -> str:
    meaning = ""
    if difference["mode"] == "shuffled":
        own = "its own part" if difference["over"] == "parts" else "its own document"
        meanings = {
            True: f": the memory carries something of {own}",
            False: ", which no sound memory is: look for a fault",
            None: f": this run does not show that the memory carries anything of {own}",
        }
        meaning = meanings[difference["worse"]]
    return f"memory {name} against {difference['against']}: {verdict(difference)}{meaning}"


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

    protocol = result.protocol
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=[3, 2])
    for number, (name, bins) in enumerate(result.positions.items()):
        bits = [bin_["nats_per_token"] / math.log(2) for bin_ in bins]
        above.plot(centres(bins), bits, "o-", markersize=3, color=f"C{number}", label=f"memory {name}")
        against = result.differences.get(name, {}).get("against")
        if against is not None:
            on = {bin_["first"]: bin_["nats_per_token"] / math.log(2) for bin_ in result.positions[against]}
            gaps = [x - on[bin_["first"]] for x, bin_ in zip(bits, bins, strict=True)]
            below.plot(centres(bins), gaps, "o-", markersize=3, color=f"C{number}", label=f"{name} - {against}")
    below.axhline(0, color="black", linewidth=0.8)
    for axis in (above, below):
        axis.axvline(protocol["segment"], color="grey", linestyle=":", linewidth=1)
        axis.set_xscale("log")
        axis.grid(alpha=0.3)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=8)
    note = {"transform": above.get_xaxis_transform(), "va": "top", "fontsize": 8, "color": "grey"}
    above.text(protocol["segment"], 0.99, " memory is first read", **note)
    above.set_ylabel("bits per token")
    below.set_ylabel("bits above memory on")
    below.set_xlabel("position in the document (tokens)")
    title = f"{Path(protocol['data']).name}: {protocol['tokens']:,} tokens, {counted(protocol['documents'])}"
    above.set_title(f"{title}, T={protocol['segment']}, W={protocol['window']}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def centres(bins: list[dict[str, float]]) -> list[float]:
    """Where bins of positions stand on a logarithmic axis."""
    return [math.sqrt(max(bin_["first"], 0.5) * bin_["last"]) for bin_ in bins]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if value < 1e4 else f"{value:.3g}"


def _bits(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"
