"""What `pmi data prepare` and `pmi data inspect` print about prepared data, and the histogram of document lengths."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from lm.data.prepared import Manifest, Prepared
from lm.errors import UserError

PICTURES = (".png", ".pdf", ".svg")


def padding_share(lengths: NDArray[np.int64], segment: int) -> float:
    """The share of positions that are padding when every document starts at a boundary of segments of `segment`."""
    positions = int((-(-lengths // segment)).sum()) * segment
    return 1 - int(lengths.sum()) / positions


def summary(manifest: Manifest) -> Table:
    """Counts per split, and the share of unknown tokens where there are any."""
    partial = ", partial" if manifest.partial else ""
    title = f"{manifest.dataset}, {manifest.vocab_size:,} ids{partial} (/word, /byte: tokens per word and byte)"
    table = Table(title=title, title_justify="left", caption_justify="left", box=None, pad_edge=False, padding=(0, 0, 0, 2))
    table.add_column("split", no_wrap=True)
    unknown = any(split.unknown for split in manifest.splits.values())
    for name in ("documents", "tokens", "words", "bytes", "/word", "/byte", *(["unknown"] if unknown else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for name, split in manifest.splits.items():
        table.add_row(
            name,
            *(f"{value:,}" for value in (split.documents, split.tokens, split.words, split.bytes)),
            f"{split.tokens / split.words:.3f}" if split.words else "-",
            f"{split.tokens / split.bytes:.4f}",
            *([f"{split.unknown_rate:.2%}"] if unknown else []),
        )
    if manifest.partial:
        table.caption = "partial, figures are not comparable: " + "; ".join(manifest.differences)
    return table


def problems_of(segment: int, longest: int, sample: int, plot: Path | None) -> Iterator[str]:
    """Everything that is wrong with the flags of `pmi data inspect`."""
    for name, value, least in (("segment", segment, 1), ("longest", longest, 0), ("sample", sample, 0)):
        if value < least:
            yield f"--{name} {value}: must be at least {least}"
    if plot is not None and plot.suffix not in PICTURES:
        yield f"--plot {plot}: the picture's type must be one of {', '.join(PICTURES)}"
    if plot is not None and not plot.parent.is_dir():
        yield f"--plot {plot}: there is no folder {plot.parent}; make it or name another place"


def show(data: Prepared, console: Console, segment: int, longest: int, sample: int) -> None:
    """Print everything `pmi data inspect` shows."""
    manifest = data.manifest
    console.print(summary(manifest))
    whole = manifest.source["all"]
    console.print(
        f"source: {whole['size']:,} bytes, MD5 {whole['md5']}; tokenizer: {data.tokenizer.kind}, "
        f"{manifest.tokenizer}; data: {data.fingerprint}; stored as {manifest.dtype}",
        markup=False,
        soft_wrap=True,
    )
    for name in manifest.splits:
        split = data.split(name)
        lengths = split.lengths
        console.print(
            f"\n{name}: padding at T={segment}: {padding_share(lengths, segment):.2%}; document length: "
            f"shortest {lengths.min():,}, median {int(np.median(lengths)):,}, longest {lengths.max():,} tokens",
            markup=False,
            soft_wrap=True,
        )
        for number in np.argsort(-lengths, kind="stable")[:longest].tolist():
            document = split[number]
            console.print(f"  {document.length:>12,}  {document.name}", markup=False, soft_wrap=True)
    first = next(iter(manifest.splits))
    document = data.split(first)[0]
    text = data.tokenizer.decode(document.tokens(0, sample).tolist())
    console.print(f"\nthe first {min(sample, document.length)} tokens of {document.name}:", markup=False, soft_wrap=True)
    # control characters of a text would play with the terminal
    text = "".join(character if character.isprintable() or character in "\n\t" else "\ufffd" for character in text)
    console.print(text, markup=False, soft_wrap=True)


def plot_lengths(data: Prepared, path: Path) -> None:
    """Write a histogram of document lengths, one line per split, to `path`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    lengths = {name: np.asarray(data.split(name).lengths) for name in data.manifest.splits}
    everything = np.concatenate(list(lengths.values()))
    low, high = float(everything.min()), float(everything.max())
    middle = (low * high) ** 0.5  # lengths all alike are still shown over more than a decade, so that the axis has numbers
    edges = np.geomspace(min(low * 0.9, middle / 10), max(high * 1.1, middle * 10), 42)
    figure, panels = pyplot.subplots(
        len(lengths), 1, figsize=(8, 1.2 + 1.8 * len(lengths)), sharex=True, squeeze=False, constrained_layout=True
    )
    for axes, (name, values) in zip(panels[:, 0], lengths.items(), strict=True):
        axes.hist(values, bins=edges, color="#31688e", edgecolor="white", linewidth=0.5)
        axes.axvline(float(np.median(values)), color="#d95f02", linewidth=1.5)
        axes.set_title(
            f"{name}: {len(values):,} document{'s' * (len(values) != 1)}, median {int(np.median(values)):,} tokens",
            loc="left",
            fontsize=10,
        )
        axes.set_xscale("log")
        axes.set_ylabel("documents")
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1, 0].set_xlabel("tokens per document (log scale; the line is the median)")
    panels[-1, 0].xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    figure.suptitle(f"Document lengths: {data.manifest.dataset}", x=0.01, ha="left", fontsize=12)
    try:
        figure.savefig(path, dpi=120)
    except OSError as error:
        raise UserError(f"--plot {path}: cannot be written ({error.strerror}); name another place") from error
    finally:
        pyplot.close(figure)
