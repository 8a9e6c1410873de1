"""The command `pmi plan`."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from lm.commands import Commands, Device, stderr, stdout
from lm.errors import collecting, noting

if TYPE_CHECKING:
    from serving.planning.figures import Figures
    from serving.planning.plan import Plan, Wish


def mount(app: Commands) -> None:
    """Add the command to `app`."""
    app.command(epilog="Example: pmi plan --sessions 1e6 --rate 50 --preset small --measure")(plan)


def plan(
    sessions: Annotated[float, typer.Option(help="Sessions kept in the store, e.g. 1e6.", min=1, max=1e12)],
    rate: Annotated[float, typer.Option(help="Turns per second, of all sessions together.", min=1e-6, max=1e9)],
    preset: Annotated[str, typer.Option(help="A model preset (configs/model/) or the path of its file.")] = "small",
    prompt: Annotated[float, typer.Option(help="Tokens of a turn's prompt, on average.", min=1, max=1e6)] = 100,
    output: Annotated[float, typer.Option(help="Tokens of an answer, on average.", min=1, max=1e6)] = 200,
    turns: Annotated[float, typer.Option(help="Turns of a session, on average.", min=1, max=1e9)] = 10,
    history: Annotated[int, typer.Option(help="Tokens behind a session: only a KV cache cares.", min=1, max=10**12)] = 20_000,
    lanes: Annotated[int, typer.Option(help="Lanes of each engine.", min=1, max=4096)] = 32,
    threads: Annotated[
        int | None, typer.Option(help="Threads of torch in each replica, for --measure (default: 1).", min=1)
    ] = None,
    first_token: Annotated[
        float, typer.Option(help="Seconds to the first token for 95 % of requests.", min=0.001, max=3600)
    ] = 2.0,
    utilisation: Annotated[
        float, typer.Option(help="Share of its capacity that a replica is to carry.", min=0.05, max=0.95)
    ] = 0.7,
    spare: Annotated[int, typer.Option(help="Replicas that may be down.", min=0, max=1000)] = 1,
    overhead: Annotated[float, typer.Option(help="Seconds that HTTP and Ray add to the first token.", min=0, max=60)] = 0.01,
    measure: Annotated[bool, typer.Option("--measure", help="Measure the figures on this machine first (a minute).")] = False,
    figures: Annotated[Path | None, typer.Option(help="Measured figures, read from here; with --measure, written there.")] = None,
    store: Annotated[
        str | None, typer.Option(help="Where --measure keeps its sessions (default: a file that is removed).")
    ] = None,
    device: Device = "auto",
    seed: Annotated[int, typer.Option(help="Seed of the simulation.", min=0)] = 0,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Replicas, store, network and memory for a load, and the latency that it will see.

    Computed from measured figures, then simulated.
    """
    from lm.config import load_model_config
    from lm.model.pretrained import resolve_device
    from serving.planning.figures import load_figures
    from serving.planning.plan import Wish, make_plan
    from serving.planning.simulate import Load

    with collecting() as problems:
        if threads is not None and not measure:
            problems.append(
                f"--threads {threads}: is for --measure; figures from a file have the threads they were measured with"
            )
        if figures is not None and not measure and not figures.is_file():
            problems.append(f"--figures {figures}: no such file; add --measure to measure them and write them there")
        if store is not None and not measure:
            problems.append(f"--store {store}: is for --measure, which was not asked for")
        with noting(problems):
            target = resolve_device(device)
        with noting(problems):
            config = load_model_config(preset, ["dropout=0"])
    if measure:
        from serving.planning.measure import measure as measured

        with stderr.status("measuring") as status:
            found = measured(preset, config, lanes, threads or 1, store, target, lambda what: status.update(f"measuring: {what}"))
        if figures is not None:
            found.save(figures)
    else:
        found = load_figures(preset, figures)
    if lanes > max(found.step):
        stderr.print(
            f"note: measured up to {max(found.step)} lanes; the steps of {lanes} are on the line of the last two", highlight=False
        )
    wish = Wish(
        int(sessions), Load(rate, prompt, output, turns), lanes, utilisation, first_token, spare, overhead, history
    )  # fmt: skip
    with stderr.status("simulating") as status:
        made = make_plan(found, wish, seed, status.update)
    if json_:
        stdout.print_json(json.dumps({"figures": found.model_dump(), "plan": made.row()}))
    else:
        _show(found, wish, made)


def _show(figures: "Figures", wish: "Wish", made: "Plan") -> None:
    stdout.print(f"figures of {figures.preset}: {figures.machine}", markup=False, highlight=False)
    load = wish.load
    table = Table("", "", title=f"{wish.sessions:,} sessions, {load.rate:g} turns/s of {load.prompt:g} + {load.output:g} tokens")
    rows = [
        ("replicas", f"{made.replicas:,} ({wish.lanes} lanes each; one carries {made.per_replica:.3g} turns/s at most)"),
        ("streams at a time", f"{made.concurrent:,.0f}"),
        ("memory", f"{size(made.memory_bytes)} ({size(made.replica_bytes)} per replica)"),
        ("store", f"{size(made.store_bytes)} ({size(figures.session_bytes)} per session)"),
        (
            "store traffic",
            f"{size(made.store_reads)}/s read, {size(made.store_writes)}/s written, {made.store_commits:,.0f} commits/s",
        ),
        ("to clients", f"{size(made.client_bytes)}/s at one token per event"),
    ]
    for row in rows:
        table.add_row(*row)
    stdout.print(table)
    latency = Table(
        "",
        "p50",
        "p95",
        "p99",
        "p50",
        "p95",
        "p99",
        "refused",
        "lanes used",
        title=f"simulated, {made.simulated:,} turns: first token, between tokens",
    )
    for name, found in (("steady", made.steady), ("one killed", made.degraded)):
        times = (found.first_p50, found.first_p95, found.first_p99, found.gap_p50, found.gap_p95, found.gap_p99)
        latency.add_row(name, *map(duration, times), f"{found.refused:.1%}", f"{found.occupancy:.0%}")
    stdout.print(latency)
    kv = made.kv
    stdout.print(
        f"A KV cache of {wish.history:,} tokens ({wish.kv_bytes} bytes per number) instead: {size(kv.session_bytes)} per session "
        f"({kv.ratio:.3g} times ours), {size(kv.store_bytes)} for all, {size(kv.read_bytes)}/s to bring them back, or "
        f"{duration(kv.resume_seconds)} of computing per resumed turn.",
        markup=False,
        highlight=False,
    )


def size(bytes_: float) -> str:
    """Bytes for people."""
    for unit in ("B", "KB", "MB", "GB", "TB"):
        if abs(bytes_) < 1000:
            return f"{bytes_:.3g} {unit}"
        bytes_ /= 1000
    return f"{bytes_:,.3g} PB"


def duration(seconds: float) -> str:
    """Seconds for people."""
    return f"{1000 * seconds:.3g}ms" if seconds < 1 else f"{seconds:.3g}s"
