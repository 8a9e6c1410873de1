"""`pmi tour`, the second half of `make run`: serve a model, stream two turns of one session over HTTP, stop."""

import contextlib
import http.client
import json
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from lm.commands import Commands, Device, stdout
from lm.errors import UserError
from lm.machine import free_port

TURNS = ("The whale", " And then the captain")
"""What is said in the session, turn by turn."""
PATIENCE = 120.0
"""Seconds in which the service must be up."""


def mount(app: Commands) -> None:
    """Add the command to `app`."""
    app.command(epilog="Example: pmi tour --checkpoint runs/demo/model")(tour)


def tour(
    checkpoint: Annotated[Path, typer.Option(help="The model to serve.")] = Path("runs/demo/model"),
    store: Annotated[Path, typer.Option(help="Where the session is kept.")] = Path("runs/demo/sessions.db"),
    tokens: Annotated[int, typer.Option(help="Tokens of each turn.", min=1)] = 120,
    device: Device = "auto",
) -> None:
    """Serve a model, stream two turns of a session from it, and stop: the whole way in one command."""
    with _served(checkpoint, store, device) as address:
        stdout.print(f"serving {checkpoint} at {address}", highlight=False, soft_wrap=True)
        session = _ask(address, "/v1/sessions", {})["id"]
        for turn in TURNS:
            stdout.rule(f"session {session}: {turn.strip()!r}")
            print(turn, end="", flush=True)
            for piece in _stream(address, {"prompt": turn, "session_id": session, "max_tokens": tokens, "stream": True}):
                print(piece, end="", flush=True)
            print()
        stdout.rule()
        kept = _ask(address, f"/v1/sessions/{session}")
        stdout.print(f"the session is at position {kept['position']}, on disk; it goes on from there:", highlight=False)
    stdout.print(f"    pmi serve --checkpoint {checkpoint} --store sqlite:///{store}", markup=False, soft_wrap=True)


@contextlib.contextmanager
def _served(checkpoint: Path, store: Path, device: str) -> Iterator[str]:
    """A `pmi serve` of our own, up."""
    port = free_port()
    store.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "serving.cli", "serve", "--checkpoint", str(checkpoint), "--port", str(port)]
    command += ["--store", f"sqlite:///{store.resolve()}", "--device", device]
    with stdout.status("starting the service"):
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        address, give_up = f"http://127.0.0.1:{port}", time.monotonic() + PATIENCE
        while not _up(address):
            if process.poll() is not None or time.monotonic() > give_up:
                process.kill()
                said = (process.communicate()[1] or "").strip().removeprefix("error: ")
                raise UserError(f"the service did not start: {said or 'it took longer than two minutes'}")
            time.sleep(0.2)
    try:
        yield address
    finally:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.communicate(timeout=60)
        process.kill()


def _up(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, http.client.HTTPException):
        return False


def _request(address: str, path: str, body: dict[str, Any] | None) -> urllib.request.Request:
    data = None if body is None else json.dumps(body).encode()
    return urllib.request.Request(f"{address}{path}", data=data, headers={"Content-Type": "application/json"})


def _ask(address: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
    with urllib.request.urlopen(_request(address, path, body), timeout=60) as answer:
        found: dict[str, Any] = json.load(answer)
        return found


def _stream(address: str, body: dict[str, Any]) -> Iterator[str]:
    """The pieces of text of a streamed completion."""
    with urllib.request.urlopen(_request(address, "/v1/completions", body), timeout=60) as answer:
        for line in answer:
            event = line.decode().strip().removeprefix("data: ")
            if line.startswith(b"data: ") and event != "[DONE]":
                for choice in json.loads(event).get("choices", []):
                    yield choice.get("text", "")
