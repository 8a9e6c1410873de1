"""The commands `pmi eval` and `pmi eval-peer`."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lm.commands import CheckedCommand, Commands, Device, stderr, stdout
from lm.errors import collecting, noting
from lm.evaluation.peer_cli import evaluate_peer, named

if TYPE_CHECKING:
    from lm.evaluation.job import Job, Result


class EvalCommand(CheckedCommand):
    """`--ray` may stand alone: it then means a cluster on this machine."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse, with the value that a bare --ray stands for."""
        follows = [*args[1:], "-"]
        given = [part for x, after in zip(args, follows, strict=True) for part in ([x, "local"] if _bare(x, after) else [x])]
        return super().parse_args(ctx, given)


def _bare(argument: str, after: str) -> bool:
    return argument == "--ray" and after.startswith("-")


def mount(app: Commands) -> None:
    """Add the commands to `app`."""
    app.command(
        "eval",
        cls=EvalCommand,
        epilog="Example: pmi eval --checkpoint runs/demo/model --data runs/demo/data --split test --by-position --out runs/eval",
    )(evaluate)
    app.command("eval-peer", epilog="Example: pmi eval-peer --model runs/gpt2 --data runs/demo/data --context 128 --stride 64")(
        evaluate_peer
    )
    app.command("eval-compare", epilog="Example: pmi eval-compare runs/eval-on runs/eval-off")(compare_evaluations)


def compare_evaluations(
    first: Annotated[Path, typer.Argument(help="A folder of `pmi eval --out`.")],
    other: Annotated[Path, typer.Argument(help="Another, of the same documents.")],
    memory: Annotated[
        str, typer.Option(metavar="MODE[,MODE]", help="The pass of each that is compared; one for both, or two.")
    ] = "on",
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")] = False,
) -> None:
    """Compare two evaluations of the same documents in pairs: which model is better, and whether that is sure."""
    from lm.evaluation.compare import compare
    from lm.evaluation.report import verdict

    mine, _, its = memory.partition(",")
    found = compare(first, other, (mine.strip(), its.strip() or mine.strip()))
    if json_:
        import json

        stdout.print_json(json.dumps(found))
        return
    for side in ("first", "other"):
        x = found[side]
        line = f"{x['folder']} (memory {x['memory']}, model {x['model']}): {x['nats_per_token']:.5f} nats/token"
        stdout.print(line, markup=False, highlight=False, soft_wrap=True)
    line = f"{first} against {other}: {verdict(found['difference'])}"
    stdout.print(line, markup=False, highlight=False, soft_wrap=True)


def evaluate(
    checkpoint: Annotated[Path, typer.Option(help="A model folder.")],
    data: Annotated[Path, typer.Option(help="A prepared folder, a text file, or a folder of .txt files (one document each).")],
    split: Annotated[str, typer.Option(help="The split of prepared data.")] = "test",
    memory: Annotated[
        str, typer.Option(metavar="on|off|reset|shuffled", help="Memory modes, several with commas, or all.")
    ] = "on",
    segment: Annotated[int | None, typer.Option(help="T: another segment than the model was trained with.")] = None,
    window: Annotated[int | None, typer.Option(help="W: another window than the model was trained with.")] = None,
    by_position: Annotated[
        bool,
        typer.Option("--by-position", help="Loss by position for every memory mode: result.json and by-position.png in OUT."),
    ] = False,
    documents: Annotated[str | None, typer.Option(metavar="A,B", help="Only these documents, by name.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Where results go. Run again with the same folder, an interrupted evaluation goes on.")
    ] = None,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16: the type the model computes in.")] = "float32",
    lanes: Annotated[int | None, typer.Option(help="Most documents read side by side (default: by size).", min=1)] = None,
    call_tokens: Annotated[int | None, typer.Option(help="Tokens of one call of the model, about.", min=1)] = None,
    device: Device = "auto",
    ray: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="Spread documents over a Ray cluster: local, auto, HOST:PORT or ray://HOST:PORT."),
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Ray workers at a time (default: the cluster's CPUs).", min=1)] = None,
    metrics_port: Annotated[
        int | None, typer.Option(help="Serve Prometheus metrics of this run on this port.", min=1, max=65535)
    ] = None,
) -> None:
    """Measure perplexity with carried memory; every token is predicted exactly once."""
    from lm import machine
    from lm.evaluation.corpus import open_corpus
    from lm.evaluation.job import Job, Options
    from lm.evaluation.report import draw, show
    from lm.evaluation.stream import CALL_TOKENS
    from lm.evaluation.variants import MODES, refuse_without_memory
    from lm.model.pretrained import from_pretrained, resolve_device

    machine.keep_pages()
    names = list(MODES) if memory == "all" else [name.strip() for name in memory.split(",")]
    with collecting() as problems:
        if unknown := [name for name in names if name not in MODES]:
            problems.append(f"--memory {','.join(unknown)!r}: must be of {', '.join(MODES)}, or all")
        if os.environ.get("WORLD_SIZE", "1") != "1":
            problems.append(f"WORLD_SIZE={os.environ['WORLD_SIZE']}: an evaluation is one process; spread documents with --ray")
        if by_position and out is None:
            problems.append("--by-position: writes a picture; name a folder for it with --out")
        with noting(problems):
            target = resolve_device(device)
        with noting(problems):
            loaded = from_pretrained(checkpoint)
        if not data.exists():
            problems.append(f"--data {data}: there is no such file or folder; give prepared data or text")
    loaded.model.to(target)
    modes = [mode for mode in MODES if mode in names or by_position]
    if loaded.model.config.memory is None and by_position:
        modes = ["off"]
    refuse_without_memory(loaded, modes)
    corpus = open_corpus(data, split, loaded.tokenizer, named(documents))
    options = Options(modes, segment, window, dtype, lanes, call_tokens or CALL_TOKENS, out)
    job = Job(loaded, corpus, options)
    result = _run(job, ray, workers, metrics_port)
    if json_:
        import json

        stdout.print_json(json.dumps(result.row()))
    else:
        show(result, stdout)
    if out is not None:
        if by_position:
            draw(result, out / "by-position.png")
        if not json_:
            also = " and by-position.png" if by_position else ""
            stdout.print(f"wrote result.json{also} to {out}", markup=False, highlight=False, soft_wrap=True)
    if not result.leak_alarm.quiet:
        stderr.print(f"LEAK ALARM: {result.leak_alarm.leaks[0]}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(1)


def _run(job: "Job", ray: str | None, workers: int | None, metrics_port: int | None) -> "Result":
    from lm.evaluation.progress import follow

    if ray is None:
        return follow(job, stderr, metrics_port)
    from lm.evaluation.cluster import Cluster

    cluster = Cluster(ray, lambda line: stderr.print(line, markup=False, soft_wrap=True), workers=workers or 0)
    try:
        return follow(job, stderr, metrics_port, cluster)
    finally:
        cluster.close()
