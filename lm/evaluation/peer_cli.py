"""The command `pmi eval-peer`: a Hugging Face model under the protocol of `pmi eval`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from lm.commands import Device, stderr, stdout
from lm.errors import UserError


def named(documents: str | None) -> list[str] | None:
    """The names that --documents gives."""
    if documents is None:
        return None
    names = [name.strip() for name in documents.split(",") if name.strip()]
    if not names:
        raise UserError(f"--documents {documents!r}: names none; give names with commas between them")
    return names


def evaluate_peer(
    model: Annotated[Path, typer.Option(help="A folder with a Hugging Face causal LM and its tokenizer (theirs, or ours).")],
    data: Annotated[Path, typer.Option(help="A prepared folder, a text file, or a folder of .txt files (one document each).")],
    split: Annotated[str, typer.Option(help="The split of prepared data.")] = "test",
    context: Annotated[int | None, typer.Option(help="Tokens of a window (default: the model's longest).")] = None,
    stride: Annotated[int | None, typer.Option(help="Tokens that each window predicts (default: half the context).")] = None,
    documents: Annotated[str | None, typer.Option(metavar="A,B", help="Only these documents, by name.")] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    device: Device = "auto",
) -> None:
    """Measure a Hugging Face model on the same documents, with a sliding window; every token is predicted once."""
    import time

    from rich.progress import track

    from lm.evaluation.alarm import Alarm
    from lm.evaluation.figures import by_position, figures, why_no_interval
    from lm.evaluation.job import Result
    from lm.evaluation.peer import corpus_for, load_peer
    from lm.evaluation.peer import evaluate_peer as read
    from lm.evaluation.report import counted, show
    from lm.evaluation.stream import Watch
    from lm.evaluation.tally import Outcome
    from lm.model.pretrained import resolve_device

    chosen = named(documents)
    peer = load_peer(model, resolve_device(device))
    context = context or min(peer.longest, 1024)
    stride = stride or max(1, context // 2)
    corpus = corpus_for(peer, data, split, chosen)
    outcomes: list[Outcome] = []
    began = time.perf_counter()
    for item in track(corpus.items, "reading", console=stderr, disable=not stderr.is_terminal):
        read(peer, [item], context, stride, Watch(done=outcomes.append))
    found = figures(outcomes, None, time.perf_counter() - began)
    name = f"none, stride {stride}"
    own = peer.own.kind if peer.own else "its own"
    protocol: dict[str, Any] = {
        "model": f"{peer.name} {model.name}",
        "parameters": sum(p.numel() for p in peer.model.parameters()),
        "tokenizer": f"{own} {peer.own.fingerprint() if peer.own else ''}".strip(),
        "data": corpus.name,
        "data_fingerprint": corpus.fingerprint,
        "documents": len(corpus.items),
        "tokens": corpus.tokens,
        "segment": context,
        "window": 0,
        "trained_with": {"segment": context, "window": 0},
        "dtype": str(next(peer.model.parameters()).dtype).removeprefix("torch."),
        "prediction": "every token predicted once, position 0 (BOS) never",
        "streams": {name: f"{counted(len(corpus.items))}, each from its start"},
        "modes": {name: f"a sliding window, context {context}, stride {stride}"},
        "sums": "float64",
        "words_are": corpus.words_are,
        "unknown_rate": corpus.unknown / corpus.tokens if peer.own and peer.own.unknown is not None else None,
        "comparable": not corpus.not_comparable,
        "not_comparable": corpus.not_comparable,
    }
    notes = [*corpus.notes, *why_no_interval(found, context)]
    result = Result(protocol, {name: found}, {name: by_position(outcomes)}, {}, Alarm(0, 0, []), notes)
    if json_:
        stdout.print_json(json.dumps(result.row()))
    else:
        show(result, stdout)
