"""The paper's heat maps for a live session: `pmi sessions show NAME --plot memory.png`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.model.inspection import Inspection, LayerInspection

MAX_LABELS = 72
"""Tokens that are written out below a heat map; more would not be legible."""
Rows = list[list[float]] | None


def draw_inspection(inspection: Inspection, labels: Sequence[str], title: str, out: Path) -> None:
    """A block of six or eight panels per memory layer; `labels` name the tokens of the last segment."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    count = len(inspection.layers)
    figure = pyplot.figure(figsize=(13, 0.5 + 6.5 * count), layout="constrained")
    figure.suptitle(title)
    blocks = figure.subfigures(count, 1, squeeze=False)
    for block, layer in zip(blocks[:, 0], inspection.layers, strict=True):
        block.suptitle(f"layer {layer.layer}", fontsize=10)
        tables = layer.verbatim_used is not None
        grid = block.subplots(3 + tables, 2, width_ratios=[1, 3])
        _bars(grid[0, 0], "length of the working slots", {"": layer.working_norms})
        _heat(block, grid[1, 0], "length of the rows of long-term memory", layer.long_term_norms, "fragment", "viridis")
        _bars(grid[2, 0], "gates, mean of each slot", {"input": layer.take, "forget (1 keeps)": layer.keep}, top=1.35)
        if tables:
            _bars(grid[3, 0], "share of the verbatim rows in use", {"": layer.verbatim_used}, unit="table")
        _reads(block, grid[:, 1], layer, labels)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _reads(block: Any, column: Any, layer: LayerInspection, labels: Sequence[str]) -> None:
    """What each token of the last segment reads, and how strongly it would be written."""
    what = "length of each fragment's answer" if layer.long_term_kind == "fragment" else "attention"
    panels = (
        ("read of working memory: attention", layer.working_attention, "slot"),
        (f"read of long-term memory: {what}", layer.long_term_attention, layer.long_term_kind),
        ("strength of writing to long-term memory", layer.write_strength, "fragment"),
        ("read of the verbatim tables: length of each one's answer", layer.verbatim_answers, "table"),
    )
    for axis, (title, rows, unit) in zip(column, panels, strict=False):  # the last only where there are tables
        turned = None if rows is None else [list(x) for x in zip(*rows, strict=True)]
        _heat(block, axis, title, turned, unit, "magma")
        if not turned:
            continue
        if len(labels) <= MAX_LABELS:
            axis.set_xticks(range(len(labels)), labels, fontsize=7, family="monospace")
        else:
            axis.set_xlabel("token of the segment", fontsize=8)


def _bars(axis: Any, title: str, series: dict[str, list[float] | None], top: float | None = None, unit: str = "slot") -> None:
    axis.set_title(title, fontsize=9)
    drawn = {name: values for name, values in series.items() if values is not None}
    if not drawn:
        _none(axis)
        return
    width = 0.8 / len(drawn)
    for i, (name, values) in enumerate(drawn.items()):
        shift = (i - (len(drawn) - 1) / 2) * width
        axis.bar([x + shift for x in range(len(values))], values, width, label=name, color=f"C{i}")
    axis.set_xlabel(unit, fontsize=8)
    count = max(map(len, drawn.values()))
    axis.set_xticks(range(0, count, -(-count // 16)))
    if top is not None:
        axis.set_ylim(0, top)
        axis.set_yticks([0, 0.5, 1])
        axis.legend(fontsize=7, loc="upper right", ncols=2)
    axis.tick_params(labelsize=7)


def _heat(block: Any, axis: Any, title: str, rows: Rows, unit: str, colours: str) -> None:
    axis.set_title(title, fontsize=9)
    if not rows or not rows[0]:
        _none(axis)
        return
    image = axis.imshow(rows, aspect="auto", cmap=colours, vmin=0, interpolation="nearest")
    axis.set_ylabel(unit, fontsize=8)
    axis.set_yticks(range(len(rows)) if len(rows) <= 16 else [0, len(rows) - 1])
    axis.tick_params(labelsize=7)
    block.colorbar(image, ax=axis, fraction=0.04, pad=0.01).ax.tick_params(labelsize=7)


def _none(axis: Any) -> None:
    axis.text(0.5, 0.5, "not in this model", ha="center", va="center", fontsize=8, color="gray", transform=axis.transAxes)
    axis.axis("off")


def token_labels(pieces: Sequence[bytes]) -> list[str]:
    """Tokens as they can be printed: blanks made visible, half characters a dot."""
    shown = []
    for piece in pieces:
        text = piece.decode("utf-8", errors="replace").replace(" ", "_").replace("\n", "/").replace("$", r"\$")
        shown.append(text if text and text.isprintable() and "�" not in text else "·")
    return shown
