"""`pmi sessions ...`: look at sessions, fork them, take them back, carry them elsewhere. Heavy imports stay inside commands."""

import json
import re
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lm.commands import Commands, Device, stderr, stdout
from lm.errors import UserError, collecting, noting

if TYPE_CHECKING:
    from lm.model.pretrained import Checkpoint
    from serving.sessions.base import BaseStore
    from serving.sessions.store import Session

app = Commands(help="Sessions: list, show, fork, roll back, export, import, verify, migrate.")

Name = Annotated[str, typer.Argument(help="The session's name.")]
Store = Annotated[
    str | None,
    typer.Option(help="sqlite:///FILE or redis://HOST:PORT/DB. Default: PMI_STORE, else sqlite in your data folder."),
]
Tenant = Annotated[str, typer.Option(help="Whose sessions.")]
Durability = Annotated[str, typer.Option(help="full, or relaxed: let a crash lose the newest.")]
CheckpointFolder = Annotated[Path, typer.Option(help="The folder of the session's model.")]
MaybeCheckpoint = Annotated[Path | None, typer.Option(help="The folder of the session's model.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


@contextmanager
def opened(store: str | None, durability: str = "full") -> Iterator["BaseStore"]:
    """The store that the flags name, closed at the end."""
    from serving.sessions.opening import open_store

    found = open_store(store, durability)
    try:
        yield found
    finally:
        found.close()


@app.command("ls", epilog="Example: pmi sessions ls --store sqlite:///sessions.db")
def ls(
    store: Store = None,
    tenant: Tenant = "local",
    every: Annotated[bool, typer.Option("--all", help="Of every tenant.")] = False,
    limit: Annotated[int, typer.Option(help="How many at once.", min=1, max=1000)] = 100,
    after: Annotated[str | None, typer.Option(help="Go on behind this one (the last line of a full page says which).")] = None,
    json_: Json = False,
    durability: Durability = "full",
) -> None:
    """List sessions in order of their names."""
    with opened(store, durability) as found:
        page = found.list(None if every else tenant, after, limit)
    if json_:
        rows = [_row(session) for session in page.sessions]
        stdout.print_json(json.dumps({"sessions": rows, "next": page.next, "damaged": page.damaged}))
        return
    table = Table("session", "position", "version", "bytes", "model", "changed", "in use by")
    for column in table.columns[:-1]:
        column.no_wrap = True
    for session in page.sessions:
        name = f"{session.tenant}/{session.id}" if every else session.id
        table.add_row(
            name, f"{session.position:,}", str(session.version), f"{session.bytes:,}", session.settings.model,
            _ago(session.updated), session.owner or "",
        )  # fmt: skip
    stdout.print(table)
    for name in page.damaged:
        stderr.print(f"damaged: {name}; see `pmi sessions verify`", markup=False)
    if page.next is not None:
        line = more_line(page.next, store, tenant, every, limit, durability)
        stdout.print(f"more: {line}", markup=False, soft_wrap=True)


@app.command("show", epilog="Example: pmi sessions show ada --checkpoint runs/demo/model --plot memory.png")
def show(
    name: Name,
    checkpoint: MaybeCheckpoint = None,
    plot: Annotated[Path | None, typer.Option(help="Draw slots, gates and reads to this PNG (needs --checkpoint).")] = None,
    store: Store = None,
    tenant: Tenant = "local",
    json_: Json = False,
    durability: Durability = "full",
    device: Device = "auto",
) -> None:
    """Everything about a session, and with --plot a picture of its memory.

    The picture shows the length of each slot, the gates, and what the tokens of the last segment read from working and
    long-term memory.
    """
    with collecting() as problems:
        if plot is not None and plot.suffix.lower() != ".png":
            problems.append(f"--plot {plot}: pictures are PNG; give a name that ends in .png")
        if plot is not None and checkpoint is None:
            problems.append(f"--plot {plot}: needs --checkpoint, the folder of the session's model")
        if device != "auto" and checkpoint is None:
            problems.append(f"--device {device!r}: is for the model in --checkpoint, which was not given")
        loaded = None
        if checkpoint is not None:
            with noting(problems):
                loaded = _load(checkpoint, device)
    with opened(store, durability) as found:
        session = found.get(tenant, name)
        responses = found.responses(tenant, name)
        inspection = None
        if loaded is not None and plot is not None:
            from serving.sessions.states import inspect_session

            inspection = inspect_session(found, session, loaded)
    if loaded is not None and inspection is not None and plot is not None:
        from serving.sessions.plot import draw_inspection, token_labels

        labels = token_labels([loaded.tokenizer.decode_bytes([id]) for id in inspection.ids])
        title = f"session {name}: position {session.position:,}, the last segment ({len(inspection.ids)} tokens)"
        draw_inspection(inspection, labels, title, plot)
    if json_:
        row = _row(session) | {"responses": [_response_row(x) for x in responses]}
        stdout.print_json(json.dumps(row | ({"inspection": inspection.row()} if inspection is not None else {})))
        return
    stdout.print(_table(session, len(responses), loaded))
    if plot is not None:
        stdout.print(f"drawn: {plot}", markup=False)


@app.command("fork", epilog="Example: pmi sessions fork ada ada-2 --position 4096")
def fork(
    name: Name,
    new: Annotated[str, typer.Argument(help="Name of the new session.")],
    position: Annotated[int | None, typer.Option(help="Where it branches off (default: at its end).", min=0)] = None,
    store: Store = None,
    tenant: Tenant = "local",
    durability: Durability = "full",
) -> None:
    """A second session with the same past; both go on by themselves. Nothing is copied but a kept history."""
    with opened(store, durability) as found:
        session = found.fork(tenant, name, new, position)
    stdout.print(f"{new}: position {session.position:,}, version {session.version}", markup=False)


@app.command("rollback", epilog="Example: pmi sessions rollback ada --turn     (or: pmi sessions rollback ada 4096)")
def rollback(
    name: Name,
    position: Annotated[int | None, typer.Argument(help="One of the retained positions that `show` lists.", min=0)] = None,
    turn: Annotated[bool, typer.Option("--turn", help="To the start of the last turn.")] = False,
    expected_version: Annotated[int | None, typer.Option(help="Only if it still has this version.")] = None,
    store: Store = None,
    tenant: Tenant = "local",
    durability: Durability = "full",
) -> None:
    """Take a session back to an earlier position."""
    if (position is None) != turn:
        raise UserError("give either a POSITION or --turn; see `pmi sessions show NAME` for the positions that are retained")
    with opened(store, durability) as found:
        target = found.get(tenant, name).turn if position is None else position
        session = found.rollback(tenant, name, target, expected_version)
    stdout.print(f"{name}: position {session.position:,}, version {session.version}", markup=False)


@app.command("export", epilog="Example: pmi sessions export ada ada.session")
def export(
    name: Name,
    file: Annotated[Path, typer.Argument(help="The file to write.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the file if it exists.")] = False,
    store: Store = None,
    tenant: Tenant = "local",
    durability: Durability = "full",
) -> None:
    """Write a session to one file: its memory, window, ids and settings."""
    from serving.sessions.files import write_session

    if file.exists() and not force:
        raise UserError(f"{file} exists; give another name, or --force to replace it")
    with opened(store, durability) as found:
        content = found.content(tenant, name)
    size = write_session(file, content)
    stdout.print(f"{file}: {size:,} bytes, position {content.position:,}", markup=False)


@app.command("import", epilog="Example: pmi sessions import ada.session ada-2 --checkpoint runs/demo/model")
def import_(
    file: Annotated[Path, typer.Argument(help="A file that `pmi sessions export` wrote.")],
    name: Annotated[str, typer.Argument(help="Name of the new session.")],
    checkpoint: CheckpointFolder,
    retain: Annotated[int, typer.Option(help="Old boundaries to keep for rollback.", min=0, max=1024)] = 1,
    store: Store = None,
    tenant: Tenant = "local",
    durability: Durability = "full",
) -> None:
    """Make a session from a file, whoever wrote it.

    The file is checked against the checkpoint: fingerprints, sizes, shapes, checksums, values.
    """
    from serving.sessions.files import imported, read_session

    with collecting() as problems:
        if not file.is_file():
            problems.append(f"{file}: no such file; give one that `pmi sessions export` wrote")
        with noting(problems):
            loaded = _load(checkpoint)
    content = imported(read_session(file, loaded), retain)
    with opened(store, durability) as found:
        session = found.restore(tenant, name, content)
    stdout.print(f"{name}: position {session.position:,}, version {session.version}", markup=False)


@app.command("rm", epilog="Example: pmi sessions rm ada ada-2")
def rm(
    names: Annotated[list[str], typer.Argument(help="Sessions to delete.")],
    store: Store = None,
    tenant: Tenant = "local",
    durability: Durability = "full",
) -> None:
    """Delete sessions with their responses. This cannot be undone; `export` first what you may want again."""
    with opened(store, durability) as found, collecting() as problems:
        for name in names:
            with noting(problems):
                found.delete(tenant, name)
                stdout.print(f"{name}: deleted", markup=False)


@app.command("verify", epilog="Example: pmi sessions verify --store redis://127.0.0.1:6379/0")
def verify(
    repair: Annotated[
        bool, typer.Option("--repair", help="First count references anew and remove snapshots that no session refers to.")
    ] = False,
    store: Store = None,
    durability: Durability = "full",
) -> None:
    """Read every byte in the store and compare it with its checksums and counts. Exit code 1 if something is damaged.

    A damaged session is never removed by this: go back with `rollback`, or remove it with `rm` and then --repair.
    """
    with opened(store, durability) as found, stderr.status("reading everything"):
        done = found.repair() if repair else None
        damages = list(found.verify())
        usage = found.usage()
    if done is not None:
        what = f"{done.counts:,} counts of references, of which {done.removed:,} snapshots were removed"
        stdout.print(f"repaired: {what}", markup=False, soft_wrap=True)
        if done.kept:
            what = f"{done.kept:,} snapshots that are counted too often"
            why = "damaged sessions may refer to them; `pmi sessions rm` these, then repair again"
            stdout.print(f"left as they are: {what}: {why}", markup=False, soft_wrap=True)
    for damage in damages:
        stdout.print(f"DAMAGED {damage.where}: {damage.what}", markup=False, soft_wrap=True)
    if damages:
        raise typer.Exit(1)
    stdout.print(f"sound: {usage.sessions:,} sessions ({usage.bytes:,} bytes), {usage.responses:,} responses", markup=False)


@app.command("evict", epilog="Example: pmi sessions evict --ttl 2592000 --bytes 10000000000")
def evict(
    ttl: Annotated[float | None, typer.Option(help="Seconds without change after which a session goes.", min=1)] = None,
    bytes_: Annotated[int | None, typer.Option("--bytes", help="Over this total, the longest unchanged go.", min=0)] = None,
    store: Store = None,
    durability: Durability = "full",
) -> None:
    """Remove what has expired or is over a limit, and what crashed writers left. Sessions in use are never touched."""
    from serving.sessions.store import Limits

    with opened(store, durability) as found:
        found.limits = Limits(ttl=ttl, bytes=bytes_)
        done = found.evict()
    gone = f"{done.sessions:,} sessions, {done.responses:,} responses ({done.bytes:,} bytes), {done.orphans:,} stray files"
    stdout.print(f"evicted {gone}", markup=False)


@app.command("migrate", epilog="Example: pmi sessions migrate ada --to runs/better/model --as ada-better")
def migrate(
    name: Name,
    to: Annotated[Path, typer.Option(help="The folder of the model to move to.")],
    from_: Annotated[
        Path | None, typer.Option("--from", help="The folder of its present model; only needed where the tokenizers differ.")
    ] = None,
    as_: Annotated[str | None, typer.Option("--as", help="Make a new session of this name and leave the old one.")] = None,
    store: Store = None,
    tenant: Tenant = "local",
    durability: Durability = "full",
    device: Device = "auto",
) -> None:
    """Read a session's whole history again under another model. Only for sessions that keep their history."""
    from serving.sessions.states import check_checkpoint, read_again, translate

    with collecting() as problems:
        with noting(problems):
            new = _load(to, device)
        old = None
        if from_ is not None:
            with noting(problems):
                old = _load(from_)
    with opened(store, durability) as found:
        session = found.get(tenant, name)
        ids = found.history(tenant, name)
        if old is not None:
            check_checkpoint(session, old)
        elif session.settings.tokenizer != new.tokenizer.fingerprint():
            raise UserError(
                f"session {name!r} has ids of tokenizer {session.settings.tokenizer}, {to} has {new.tokenizer.fingerprint()}; "
                "give --from, the folder of its present model, so that the text can be translated"
            )
        with _bar("reading", len(ids)) as advance:
            content = read_again(new, translate(ids, old, new), session.settings, advance)
        if as_ is not None:
            made = found.restore(tenant, as_, content)
        else:
            made = found.put_snapshot(tenant, name, content, session.version)
    stdout.print(f"{made.id}: model {made.settings.model}, position {made.position:,}, version {made.version}", markup=False)


# --- helpers ---------------------------------------------------------------------------------------------------------


def more_line(after: str, store: str | None, tenant: str, every: bool, limit: int, durability: str) -> str:
    """The command that lists what follows `after`; a password in the store's URL is left out."""
    words = ["pmi", "sessions", "ls"]
    if store is not None:
        words += ["--store", re.sub(r"(://[^/@]*:)[^/@]+@", r"\1***@", store)]
    if every:
        words.append("--all")
    for flag, value, default in (("--tenant", tenant, "local"), ("--limit", limit, 100), ("--durability", durability, "full")):
        if value != default:
            words += [flag, str(value)]
    return shlex.join([*words, "--after", after])


@contextmanager
def _bar(what: str, total: int) -> Iterator[Any]:
    """A progress bar on a terminal, a few plain lines elsewhere."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    if stderr.is_terminal:
        with Progress(*columns, console=stderr) as progress:
            task = progress.add_task(what, total=total)
            yield lambda n: progress.update(task, advance=n)
        return
    done, said = 0, time.monotonic()

    def advance(n: int) -> None:
        nonlocal done, said
        done += n
        if time.monotonic() - said > 10:
            stderr.print(f"{what}: {done:,} of {total:,} tokens", markup=False)
            said = time.monotonic()

    yield advance


def _load(folder: Path, device: str = "cpu") -> "Checkpoint":
    from lm.model.pretrained import from_pretrained, resolve_device

    with collecting() as problems:
        with noting(problems):
            target = resolve_device(device)
        with noting(problems):
            loaded = from_pretrained(folder)
    loaded.model.to(target)
    return loaded


def _row(session: "Session") -> dict[str, Any]:
    """A session as JSON values, without its ids."""
    row = asdict(session)
    row["tail"] = len(session.tail)
    del row["recent"]
    return row


def _response_row(response: Any) -> dict[str, Any]:
    row = asdict(response)
    row["ids"] = len(response.ids)
    return row


def _table(session: "Session", responses: int, checkpoint: "Checkpoint | None") -> Table:
    settings = session.settings
    retained = ", ".join(f"{first:,}..{last:,}" if first < last else f"{first:,}" for first, last in session.retained)
    rows = {
        "tenant": session.tenant,
        "version": str(session.version),
        "position": f"{session.position:,} (boundary {session.boundary:,}, tail {len(session.tail)})",
        "last turn began at": f"{session.turn:,}",
        "can go back to": retained,
        "snapshot": session.snapshot or "none yet: the model's initial state",
        "model": f"{settings.model} (segment {settings.segment})",
        "tokenizer": settings.tokenizer,
        "sampling": f"seed {settings.seed}, stream {session.stream}, {json.dumps(dict(settings.sampling))}",
        "history kept": f"yes, {4 * session.position:,} bytes" if settings.keep_history else "no",
        "bytes": f"{session.bytes:,}",
        "forked from": session.parent or "",
        "created": _when(session.created),
        "changed": _when(session.updated),
        "expires": "never" if session.expires is None else _when(session.expires),
        "in use by": session.owner or "nobody",
        "responses": str(responses),
    }
    if checkpoint is not None:
        rows["ends with"] = repr(checkpoint.tokenizer.decode([*session.recent, *session.tail][-200:]))
    table = Table("", "", title=f"session {session.id}", show_header=False)
    for name, value in rows.items():
        if value:
            table.add_row(name, value)
    return table


def _when(moment: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(moment))


def _ago(moment: float) -> str:
    seconds = max(0.0, time.time() - moment)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"
