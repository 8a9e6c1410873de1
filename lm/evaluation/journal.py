"""The journal of an evaluation: what is done stays done, so that a run that ended early goes on from there.

OUT/evaluation.json   what is evaluated; a run with other options refuses the folder
OUT/journal.jsonl     a line per document and pass, appended as it ends; and one for the seconds of each saving in between
OUT/open/             documents in the middle: sums, and the snapshot of each lane (long documents lose no more than a minute)
OUT/result.json       written last
"""

import io
import json
import time
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.data.files import write_atomically
from lm.errors import UserError
from lm.evaluation.corpus import Item
from lm.evaluation.stream import Open
from lm.evaluation.tally import Outcome, Tally
from lm.model import PMI
from lm.model.snapshot import Identity, SnapshotError, dump, load_snapshot

ABOUT, LINES, OPEN, RESULT = "evaluation.json", "journal.jsonl", "open", "result.json"
SAVE_EVERY = 60.0
"""Seconds between savings of documents in the middle."""


class Journal:
    """Outcomes by pass; in a folder, or only in memory where there is none."""

    def __init__(self, folder: Path | None, about: dict[str, Any]) -> None:
        self.folder, self.about = folder, about
        self.outcomes: dict[str, dict[int, Outcome]] = {}
        self.seconds: dict[str, float] = {}
        self._last = self._saved = time.monotonic()
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        self._refuse_another(folder / ABOUT)
        for row in self._rows(folder / LINES):
            if row["outcome"] is not None:
                outcome = Outcome.from_row(row["outcome"])
                self.outcomes.setdefault(row["pass"], {})[outcome.number] = outcome
            self.seconds[row["pass"]] = self.seconds.get(row["pass"], 0.0) + row["seconds"]

    def _refuse_another(self, path: Path) -> None:
        text = json.dumps(self.about, indent=2) + "\n"
        if not path.exists():
            if any(path.parent.iterdir()):
                raise UserError(f"--out {path.parent}: holds other files; name an empty or new folder")
            write_atomically(path, text.encode())
        elif (found := _loaded(path)) != json.loads(text):
            different = sorted(key for key in {*found, *self.about} if found.get(key) != self.about.get(key))
            raise UserError(
                f"--out {path.parent}: holds another evaluation (it differs in {', '.join(different)}); name another folder"
            )

    def _rows(self, path: Path) -> Iterator[dict[str, Any]]:
        if not path.exists():
            return
        whole = 0
        data = path.read_bytes()
        for line in data.splitlines(keepends=True):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if row is None or not line.endswith(b"\n"):
                break
            whole += len(line)
            yield row
        if whole < len(data):  # a line cut short by a crash: what follows must begin a line of its own
            with path.open("r+b") as file:
                file.truncate(whole)

    def begin(self) -> None:
        """Time counts from here."""
        self._last = self._saved = time.monotonic()

    def add(self, name: str, outcome: Outcome) -> None:
        """A document is done."""
        self.outcomes.setdefault(name, {})[outcome.number] = outcome
        self._note(name, outcome)
        if self.folder is not None:
            self._path(name, outcome.number).unlink(missing_ok=True)

    def _note(self, name: str, outcome: Outcome | None) -> None:
        """A line: the seconds since the last one went into this document, or into what is in the middle."""
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        if self.folder is not None:
            row = {"pass": name, "seconds": seconds, "outcome": outcome.row() if outcome else None}
            with (self.folder / LINES).open("a") as file:
                file.write(json.dumps(row) + "\n")

    def due(self) -> bool:
        """Whether documents in the middle should be saved now."""
        return self.folder is not None and time.monotonic() - self._saved > SAVE_EVERY

    def save(self, name: str, model: PMI, identity: Identity, opened: Sequence[Open]) -> None:
        """Keep documents in the middle."""
        if self.folder is None:
            return
        (self.folder / OPEN).mkdir(exist_ok=True)
        for part in opened:
            tally, buffer = part.tally, io.BytesIO()
            arrays: dict[str, Any] = {
                f"lane{i}": np.frombuffer(dump(model, state, 0, identity), np.uint8) for i, state in enumerate(part.states)
            }
            np.savez(buffer, first=tally.first, segments=tally.segments[: tally.done], **arrays)
            write_atomically(self._path(name, tally.item.number), buffer.getvalue())
        if opened:
            self._note(name, None)
        self._saved = time.monotonic()

    def opened(self, name: str, model: PMI, identity: Identity, items: Sequence[Item], lanes: int) -> list[Open]:
        """The documents of a pass that an earlier run left in the middle; what cannot be read is read anew."""
        found = []
        done = self.outcomes.get(name, {})
        for item in items:
            path = self._path(name, item.number)
            if self.folder is None or item.number in done or not path.exists():
                continue
            tally = Tally(item, model.config.segment)
            try:
                with np.load(path, allow_pickle=False) as arrays:
                    segments = arrays["segments"]
                    tally.first[:] = arrays["first"]
                    states = [load_snapshot(model, arrays[f"lane{i}"].tobytes(), identity) for i in range(lanes)]
                tally.segments[: len(segments)] = segments
            except (OSError, ValueError, KeyError, SnapshotError, zipfile.BadZipFile):
                continue
            tally.done = len(segments)
            if tally.left > 0 and all(int(state.position) == tally.done * tally.segment for state in states):
                found.append(Open(tally, states))
        return found

    def _path(self, name: str, number: int) -> Path:
        return (self.folder or Path()) / OPEN / f"{name.replace(' ', '-')}-{number}.npz"

    def finish(self, result: dict[str, Any]) -> None:
        """Write the result."""
        if self.folder is not None:
            write_atomically(self.folder / RESULT, (json.dumps(result, indent=2) + "\n").encode())
            if (self.folder / OPEN).is_dir() and not any((self.folder / OPEN).iterdir()):
                (self.folder / OPEN).rmdir()


def _loaded(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        found = None
    if not isinstance(found, dict):
        raise UserError(f"{path}: cannot be read; name another --out, or delete that folder")
    return found
