"""`pmi explain`: which words of a text a language model's memories go back to when it predicts a token.

The figures are those of lm/model/inspection.py (`trace_reads`), summed over the tokens of each word and averaged over layers.
"""

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from lm.data.tokenizer import Tokenizer
from lm.errors import UserError
from lm.model import PMI
from lm.model.inspection import trace_reads
from lm.reasoning.tasks.dataset import write_json

LEVELS = ("working", "long_term", "verbatim")
TOP = 30
"""Words that are named."""
LONGEST = 60
"""Characters of a text in the picture."""


def explain(model: PMI, tokenizer: Tokenizer, text: str, at: int | None, segments: int) -> dict[str, Any]:
    """The prediction of token `at` of `text` (None: the last), traced through the memories, as JSON values."""
    if model.config.memory is None:
        raise UserError("this model has memory: off; give the checkpoint of a model with memory")
    ids, segment = tokenizer.encode_prompt(text), model.config.segment
    if len(ids) <= segment:
        raise UserError(f"--text: has {len(ids)} tokens; more than a segment ({segment}) are needed, or nothing is in memory yet")
    at = len(ids) - 1 if at is None else at
    if not segment <= at < len(ids):
        why = f"of the {len(ids)} tokens the first {segment} find nothing in memory"
        raise UserError(f"--at {at}: must be {segment} to {len(ids) - 1} ({why})")
    read = [tokenizer.bos, *ids[:at]]
    model.eval()
    with torch.no_grad():
        hidden, _ = model(torch.tensor([read], device=model.device), model.initial_state(1))
        likely = model.head.logits(hidden[:, -1])[0].float().softmax(-1)
    trace = trace_reads(model, read, segments)
    spans = words(tokenizer, read)
    named: dict[str, list[dict[str, Any]]] = {}
    histogram: dict[str, list[float]] = {}
    for level in LEVELS:
        layers = [shares for layer in trace.layers if (shares := getattr(layer, level)) is not None]
        if not layers:
            continue
        shares = np.mean(layers, 0)
        histogram[level] = [float(shares[first:last].sum()) for first, last, _ in spans]
        order = np.argsort(histogram[level])[::-1][:TOP]
        named[level] = [
            {"text": spans[i][2], "token": spans[i][0] - 1, "back": at - (spans[i][0] - 1), "share": histogram[level][i]}
            for i in order.tolist()
            if histogram[level][i] > 0
        ]
    best = likely.topk(min(5, len(likely)))
    return {
        "at": at, "segment": segment, "in_memory": at // segment * segment,
        "traced_from": max(0, (at // segment - segments) * segment - 1),
        "target": {"text": tokenizer.decode([ids[at]]), "probability": float(likely[ids[at]])},
        "predicted": [
            {"text": tokenizer.decode([i]), "probability": p}
            for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ],
        "before": tokenizer.decode(ids[max(0, at - 80) : at]),
        "words": [{"token": first - 1, "text": text} for first, _, text in spans],
        "histogram": histogram, "top": named, "layers": [asdict(layer) for layer in trace.layers],
    }  # fmt: skip


def words(tokenizer: Tokenizer, ids: Sequence[int]) -> list[tuple[int, int, str]]:
    """The words that ids make, each as (first id, one behind the last, text); white space goes with what is before it.

    A token that begins with white space begins a word, and so does one behind white space.
    """
    spans: list[tuple[int, int, str]] = []
    begin, content = 0, b""
    for place, number in enumerate(ids):
        piece = tokenizer.decode_bytes([number])
        parted = content[-1:].isspace() or piece[:1].isspace()
        if parted and content.strip() and piece.strip():
            spans.append((begin, place, _decoded(content)))
            content = b""
        if not content:  # BOS stands for nothing and is part of no word
            begin = place
        content += piece
    return [*spans, (begin, len(ids), _decoded(content))]


def _decoded(content: bytes) -> str:
    return content.decode("utf-8", errors="replace").strip()


def write(found: dict[str, Any], out: Path) -> None:
    """explain.json and explain.png."""
    write_json(out / "explain.json", found)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    levels = list(found["histogram"])
    figure, axes = pyplot.subplots(len(levels), 2, figsize=(15, 4.8 * len(levels)), squeeze=False, width_ratios=[1.5, 1])
    places = [word["token"] for word in found["words"]]
    for level, (left, right) in zip(levels, axes, strict=True):
        name = level.replace("_", "-")
        left.vlines(places, 0, found["histogram"][level], linewidth=1.2)
        left.axvspan(found["in_memory"] - 1, found["at"], color="grey", alpha=0.2, label="own segment: not in memory yet")
        if found["traced_from"]:
            left.axvspan(0, found["traced_from"], color="orange", alpha=0.2, label="too far back: not traced (--segments)")
        left.set(title=f"{name} memory: share of each word in what is read", xlabel="token of the text", ylabel="share")
        left.set_ylim(0, 1.2 * max(found["histogram"][level]) or 1.0)  # room for the legend
        left.legend(fontsize=8, loc="upper left")
        top = found["top"][level][::-1]
        right.barh(range(len(top)), [word["share"] for word in top])
        named = [f"{_plain(word['text'])} ({word['back']} tokens back)" for word in top]
        right.set_yticks(range(len(top)), named, fontsize=7, parse_math=False)
        right.set(ylim=(-0.7, len(top) - 0.3), xlabel="share")
        right.set_title(f"{name} memory: the words with the greatest share", fontsize=10)
    target, before = found["target"], _plain(found["before"], last=True)
    said = f"predicting {_plain(target['text'])!r} (p = {target['probability']:.3f}) behind ...{before!r}"
    figure.suptitle(said, parse_math=False)
    with warnings.catch_warnings():  # a letter that the font lacks is a box in the picture; explain.json has it
        warnings.filterwarnings("ignore", message="Glyph .* missing")
        figure.tight_layout()
        figure.savefig(out / "explain.png", dpi=110)
    pyplot.close(figure)


def _plain(text: str, last: bool = False) -> str:
    """A text that a picture can hold: nothing unprintable, and not more than LONGEST characters, the first or the last."""
    shown = "".join(c if c.isprintable() else " " for c in text)
    if len(shown) <= LONGEST:
        return shown
    return shown[-LONGEST:] if last else f"{shown[: LONGEST - 3]}..."
