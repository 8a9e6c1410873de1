"""`pmi explain`: which words of a text a language model's memories go back to when it predicts a token.

The figures are those of lm/model/inspection.py (`trace_reads`), summed over the tokens of each word and averaged over layers.
"""

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

LEVELS = ("working", "long_term")
TOP = 30
"""Words that are named."""


def explain(model: PMI, tokenizer: Tokenizer, text: str, at: int | None, segments: int) -> dict[str, Any]:
    """The prediction of token `at` of `text` (None: the last), traced through the memories, as JSON values."""
    if model.config.memory is None:
        raise UserError("this model has memory: off; give the checkpoint of a model with memory")
    ids = tokenizer.encode(text)
    at = len(ids) - 1 if at is None else at
    if not 0 <= at < len(ids):
        raise UserError(f"--at {at}: must be a token of the text, 0 to {len(ids) - 1}")
    read = [tokenizer.bos, *ids[:at]]
    segment = model.config.segment
    if len(read) <= segment:
        raise UserError(
            f"--at {at}: nothing is in memory before the first segment of {segment} tokens is over; choose {segment} or more"
        )
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
        ]
    best = likely.topk(min(5, len(likely)))
    return {
        "at": at, "segment": segment, "in_memory": (len(read) - 1) // segment * segment,
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
    """The words that ids make, each as (first id, one behind the last, text); a word ends where white space does."""
    spans: list[tuple[int, int, str]] = []
    begin, content = 0, b""
    for place, number in enumerate(ids):
        piece = tokenizer.decode_bytes([number])
        if content and content[-1:].isspace() and not piece[:1].isspace():
            spans.append((begin, place, content.decode("utf-8", errors="replace").strip()))
            content = b""
        if not content:  # BOS stands for nothing and is part of no word
            begin = place
        content += piece
    return [*spans, (begin, len(ids), content.decode("utf-8", errors="replace").strip())]


def write(found: dict[str, Any], out: Path) -> None:
    """explain.json and explain.png."""
    write_json(out / "explain.json", found)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    levels = list(found["histogram"])
    figure, axes = pyplot.subplots(len(levels), 2, figsize=(15, 4.2 * len(levels)), squeeze=False, width_ratios=[1.5, 1])
    places = [word["token"] for word in found["words"]]
    for level, (left, right) in zip(levels, axes, strict=True):
        name = level.replace("_", "-")
        left.vlines(places, 0, found["histogram"][level], linewidth=1.2)
        left.axvspan(found["in_memory"] - 1, found["at"], color="grey", alpha=0.2, label="own segment: not in memory yet")
        left.set(
            title=f"{name} memory: share of each word in what is read", xlabel="token of the text", ylabel="share", ylim=(0, None)
        )
        left.legend(fontsize=8)
        top = found["top"][level][::-1]
        right.barh(range(len(top)), [word["share"] for word in top])
        right.set_yticks(range(len(top)), [f"{_plain(word['text'])} ({word['back']} back)" for word in top], fontsize=7)
        right.set_title(f"{name} memory: the words with the greatest share", fontsize=10)
    target = found["target"]
    figure.suptitle(
        f"predicting {_plain(target['text'])!r} (p = {target['probability']:.3f}) behind ...{_plain(found['before'][-60:])!r}"
    )
    figure.tight_layout()
    figure.savefig(out / "explain.png", dpi=110)
    pyplot.close(figure)


def _plain(text: str) -> str:
    """A text that a picture can hold: no dollar signs (they begin a formula), nothing unprintable."""
    return "".join(c if c.isprintable() else " " for c in text).replace("$", r"\$")[:60]
