"""The paper's heat maps for a live session: `pmi sessions show NAME --plot memory.png`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lm.model.inspection import Inspection, LayerInspection

PANELS = 5
MAX_LABELS = 72
"""Tokens that are written out below a heat map; more would not be legible."""


def draw_inspection(inspection: Inspection, labels: Sequence[str], title: str, out: Path) -> None:
    """One row of panels per memory layer; `labels` name the tokens of the last segment."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    width = max(4.0, min(len(labels), MAX_LABELS) * 0.11)
    figure, grid = pyplot.subplots(
        len(inspection.layers), PANELS, figsize=(7 + 3 * width, 0.8 + 3.0 * len(inspection.layers)), squeeze=False,
        width_ratios=[2.4, 2.8, width, width, width], layout="constrained",
    )  # fmt: skip
    for row, layer in zip(grid, inspection.layers, strict=True):
        _norms(figure, row[0], layer)
        _gates(row[1], layer)
        _heat(figure, row[2], layer.working_attention, labels, f"layer {layer.layer}: read of working memory", "slot", 0.0)
        associative = layer.write_strength is not None or _fragments(layer)
        name = "strength of the answers of long-term memory" if associative else "read of long-term memory"
        _heat(
            figure,
            row[3],
            layer.long_term_attention,
            labels,
            f"layer {layer.layer}: {name}",
            "fragment" if associative else "slot",
            0.0,
        )
        _heat(figure, row[4], layer.write_strength, labels, f"layer {layer.layer}: strength of writing", "fragment", 0.0)
    figure.suptitle(title)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def _fragments(layer: LayerInspection) -> bool:
    """Whether long-term memory is read by fragments (associative) and not by slots."""
    rows, norms = layer.long_term_attention, layer.long_term_norms
    return bool(rows and norms and len(rows[0]) == len(norms) and len(norms[0]) != len(rows[0]))


def _norms(figure: Any, axis: Any, layer: LayerInspection) -> None:
    """Working slots as one more row above the fragments would mislead: their scales differ. So bars and a heat map apart."""
    axis.set_title(f"layer {layer.layer}: slot norms", fontsize=9)
    if layer.long_term_norms is None and layer.working_norms is None:
        _none(axis)
        return
    axis.axis("off")
    if layer.working_norms is not None:
        upper = axis.inset_axes((0.0, 0.58, 1.0, 0.42) if layer.long_term_norms is not None else (0.0, 0.0, 1.0, 1.0))
        upper.bar(range(len(layer.working_norms)), layer.working_norms, color="C0")
        upper.set_ylabel("working", fontsize=8)
        upper.tick_params(labelsize=7)
    if layer.long_term_norms is not None:
        lower = axis.inset_axes((0.0, 0.0, 1.0, 0.42) if layer.working_norms is not None else (0.0, 0.0, 1.0, 1.0))
        image = lower.imshow(layer.long_term_norms, aspect="auto", cmap="viridis", vmin=0)
        lower.set_ylabel("fragment", fontsize=8)
        lower.set_xlabel("long-term row", fontsize=8)
        lower.tick_params(labelsize=7)
        figure.colorbar(image, ax=axis, fraction=0.06).ax.tick_params(labelsize=7)


def _gates(axis: Any, layer: LayerInspection) -> None:
    axis.set_title(f"layer {layer.layer}: gates, mean of each slot", fontsize=9)
    if layer.take is None or layer.keep is None:
        _none(axis)
        return
    places = range(len(layer.take))
    axis.bar([x - 0.2 for x in places], layer.take, 0.4, label="input", color="C1")
    axis.bar([x + 0.2 for x in places], layer.keep, 0.4, label="forget (1 keeps)", color="C2")
    axis.set_ylim(0, 1.3)
    axis.set_yticks([0, 0.5, 1])
    axis.set_xlabel("slot", fontsize=8)
    axis.legend(fontsize=7, loc="upper right", ncols=2)
    axis.tick_params(labelsize=7)


def _heat(
    figure: Any, axis: Any, rows: list[list[float]] | None, labels: Sequence[str], title: str, unit: str, low: float
) -> None:
    axis.set_title(title, fontsize=9)
    if not rows or not rows[0]:
        _none(axis)
        return
    image = axis.imshow([list(column) for column in zip(*rows, strict=True)], aspect="auto", cmap="magma", vmin=low)
    axis.set_ylabel(unit, fontsize=8)
    axis.set_yticks(range(len(rows[0])) if len(rows[0]) <= 16 else [0, len(rows[0]) - 1])
    if len(labels) <= MAX_LABELS:
        axis.set_xticks(range(len(labels)), labels, fontsize=6, family="monospace")
    else:
        axis.set_xlabel("token of the segment", fontsize=8)
    axis.tick_params(axis="y", labelsize=7)
    figure.colorbar(image, ax=axis, fraction=0.04, pad=0.01).ax.tick_params(labelsize=7)


def _none(axis: Any) -> None:
    axis.text(0.5, 0.5, "not in this model", ha="center", va="center", fontsize=8, color="gray", transform=axis.transAxes)
    axis.axis("off")


def token_labels(pieces: Sequence[bytes]) -> list[str]:
    """Tokens as they can be printed: blanks and half characters made visible."""
    shown = []
    for piece in pieces:
        text = piece.decode("utf-8", errors="replace")
        text = text.replace(" ", "␣").replace("\n", "⏎").replace("\t", "⇥").replace("$", r"\$")
        shown.append(text if text.isprintable() and "�" not in text else "·")
    return shown
