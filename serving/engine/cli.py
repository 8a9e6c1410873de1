"""`pmi generate`: continue a text, streaming to the terminal; with --session where the last call stopped, in any process."""

import hashlib
import sys
import uuid
from array import array
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lm.commands import Commands, Device, stderr
from lm.errors import UserError, collecting, noting

if TYPE_CHECKING:
    from lm.generation.sampling import Sampling
    from lm.model.pretrained import Checkpoint
    from serving.engine.request import Request
    from serving.engine.stream import Stream
    from serving.sessions.store import Session, SessionStore

EXAMPLE = "Example: pmi generate --checkpoint runs/demo/model --session ada --prompt 'The whale' --tokens 200"


def mount(app: Commands) -> None:
    """Add the command to `app`."""
    app.command(epilog=EXAMPLE)(generate)


def generate(
    checkpoint: Annotated[Path, typer.Option(help="A model folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    file: Annotated[Path | None, typer.Option(help="A text to read before the prompt; may be long.")] = None,
    session: Annotated[str | None, typer.Option(help="Go on with the session of this name, or begin it.")] = None,
    store: Annotated[str | None, typer.Option(help="Where sessions are (default: PMI_STORE, else your data folder).")] = None,
    tokens: Annotated[int, typer.Option(help="How many tokens to generate; 0 only reads into the session.", min=0)] = 200,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token; higher is wilder (default 0.8).", min=0, max=100)
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the k likeliest tokens only (0: all).", min=0)] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw from the likeliest tokens of this probability.", min=0, max=1)] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Leave out tokens below this share of the likeliest one.", min=0, max=1)
    ] = None,
    repetition_penalty: Annotated[
        float | None, typer.Option(help="Above 1: tokens among the last 256 come less.", min=0.01, max=100)
    ] = None,
    stop: Annotated[list[str], typer.Option(help="A string that ends the text; may be repeated.")] = [],  # noqa: B006
    seed: Annotated[
        int | None, typer.Option(help="Seed of the draws (default: the session's, else 0).", min=0, max=2**63 - 1)
    ] = None,
    keep_history: Annotated[
        bool, typer.Option("--keep-history", help="A new session keeps every id (4 bytes each), so that it can be migrated.")
    ] = False,
    durability: Annotated[str, typer.Option(help="full, or relaxed: let a crash lose the newest.")] = "full",
    device: Device = "auto",
) -> None:
    """Continue a text, streaming to the terminal.

    With --session the text goes on where the last call stopped, in another process too.

    The sampling flags of its first call are the session's defaults.

    A --file whose reading was interrupted goes on where it stopped.
    """
    from lm.model.pretrained import from_pretrained, resolve_device
    from serving.engine.config import EngineConfig
    from serving.engine.engine import Engine
    from serving.engine.request import Request
    from serving.sessions.opening import open_store
    from serving.sessions.store import LOCAL

    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p, "seed": seed}
    given = {key: value for key, value in (given | {"repetition_penalty": repetition_penalty}).items() if value is not None}
    text, opened = "", None
    with collecting() as problems:
        with noting(problems):
            target = resolve_device(device)
        with noting(problems):
            text = _text(file)
        if tokens == 0 and session is None:
            problems.append("--tokens 0: only reads, which needs a --session to keep it in; give one, or 1 or more tokens")
        if keep_history and session is None:
            problems.append("--keep-history: is for a --session; give its name")
        if not prompt.isprintable() and any("\ud800" <= c <= "\udfff" for c in prompt):
            problems.append(f"--prompt {prompt!r}: not valid UTF-8; give text")
        with noting(problems):
            sampling = _sampling(given)
        with noting(problems):
            loaded = from_pretrained(checkpoint)
        if session is not None:
            with noting(problems):
                opened = open_store(store, durability)
    loaded.model.to(target)
    ids = loaded.tokenizer.encode_prompt(text + prompt)
    request = Request(ids, tokens, sampling, stop=tuple(stop), session=session, tenant=LOCAL)
    try:
        if opened is not None and session is not None:
            present = _session(opened, session, loaded, given, keep_history)
            request = _with_session(opened, present, request, given, resumable=file is not None)
        with Engine(loaded, EngineConfig(lanes=1, queue=1), opened) as engine, engine.submit(request) as stream:
            if file is not None:
                _follow(stream, len(request.prompt))
            shown = prompt  # not before the session is ours
            for event in stream:
                sys.stdout.write(shown + event.text)
                sys.stdout.flush()
                shown = ""
            sys.stdout.write("\n")
        if opened is not None and session is not None:
            usage, now = stream.usage, opened.get(LOCAL, session)
            stderr.print(
                f"session {session}: {now.position:,} tokens, {now.bytes:,} bytes; "
                f"seed {usage.seed}, {usage.replayed} tokens replayed to resume",
                style="dim",
            )  # fmt: skip
    finally:
        if opened is not None:
            opened.close()


def _text(file: Path | None) -> str:
    if file is None:
        return ""
    try:
        return file.read_bytes().decode("utf-8")
    except FileNotFoundError as error:
        raise UserError(f"--file {file}: no such file") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--file {file}: not UTF-8 text (byte {error.start}); convert it first") from error
    except OSError as error:
        raise UserError(f"--file {file}: cannot be read: {error.strerror}") from error


def _sampling(values: dict[str, Any]) -> "Sampling":
    from lm.generation.sampling import Sampling

    try:
        return Sampling(**values).checked()
    except UserError as error:
        raise UserError(
            f"--{problem.replace('_', '-', problem.split(':')[0].count('_'))}" for problem in error.problems
        ) from error


def _session(store: "SessionStore", name: str, checkpoint: "Checkpoint", given: dict[str, Any], keep_history: bool) -> "Session":
    """The session, made if it is not there."""
    from serving.sessions.errors import NotFoundError
    from serving.sessions.store import LOCAL, Settings

    try:
        found = store.get(LOCAL, name)
        if keep_history and not found.settings.keep_history:
            raise UserError(f"--keep-history: session {name!r} has begun without; only a new session can keep all its ids")
        return found
    except NotFoundError:
        mine = checkpoint.identity
        defaults = {key: value for key, value in given.items() if key != "seed"}
        settings = Settings(
            mine.model, mine.tokenizer, checkpoint.model.config.segment, given.get("seed", 0), defaults,
            keep_history=keep_history,
        )  # fmt: skip
        return store.create(LOCAL, name, settings)


def _with_session(
    store: "SessionStore", session: "Session", request: "Request", given: dict[str, Any], resumable: bool
) -> "Request":
    """The request with the session's defaults, recorded so that a long text can be read on after an interruption."""
    from dataclasses import replace

    from serving.sessions.store import LOCAL, Response

    known = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty"}
    defaults = {key: value for key, value in session.settings.sampling.items() if key in known}
    request = replace(request, sampling=_sampling(defaults | {"seed": session.settings.seed} | given))
    if not resumable:
        return request
    digest = hashlib.sha256(array("q", request.prompt).tobytes()).hexdigest()
    for earlier in store.responses(LOCAL, session.id):
        done = session.position - earlier.start - (earlier.start == 0)  # BOS stands before the first id of a session
        begun = earlier.status in ("running", "interrupted") and not earlier.ids and 0 < done < len(request.prompt)
        if begun and earlier.request == digest and earlier.start == session.turn:  # no other turn has come since
            stderr.print(f"going on behind the {done:,} tokens that were read before", style="dim")
            return replace(request, prompt=request.prompt[done:], response=earlier.id, turn=False)
    fresh = Response(LOCAL, uuid.uuid4().hex, session.id, None, digest, {}, session.position)
    return replace(request, response=store.begin(fresh)[0].id)


def _follow(stream: "Stream", total: int) -> None:
    """A progress bar until the prompt is read."""
    import time

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("reading"), BarColumn(), MofNCompleteColumn(), TextColumn("tokens"), TimeRemainingColumn())
    with Progress(*columns, console=stderr, disable=not stderr.is_terminal) as progress:
        task, told = progress.add_task("reading", total=total), time.monotonic()
        while not stream.waited(0.2):
            progress.update(task, completed=stream.usage.read)
            if not stderr.is_terminal and time.monotonic() - told > 10:
                told = time.monotonic()
                stderr.print(f"reading: {stream.usage.read:,} of {total:,} tokens")
        progress.update(task, completed=total)
