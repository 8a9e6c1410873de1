"""`pmi babilong eval`: each sample is read as a session, in calls of a few segments, and the answer is generated greedily.

The state is a value of fixed size, samples are read from disk piece by piece, so a sample of ten million tokens takes the memory
of one of a thousand. Answers are kept as they come (answers.jsonl), and the state of a long sample now and then: the same
command goes on where it was ended.
"""

import json
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from torch import Tensor

from lm.data.files import write_atomically
from lm.data.tokenizer import Tokenizer
from lm.errors import UserError
from lm.evaluation.babilong_tasks import Sample, Tasks
from lm.evaluation.tasks_report import Curve, draw, progress, wilson
from lm.evaluation.tasks_training import claim
from lm.model import PMI, State
from lm.model.pretrained import Checkpoint
from lm.model.snapshot import Identity, SnapshotError, dump, load_snapshot

ANSWERS, REPORT, PICTURE, STREAM = "answers.jsonl", "report.json", "report.png", "stream"
SAVE_EVERY = 60.0
"""Seconds between saves of the state of samples that are being read."""


def read_streams(
    model: PMI, samples: list[Sample], bos: int, call: int, state: State | None = None, position: int = 0
) -> Iterator[tuple[int, State, Tensor]]:
    """Read samples side by side, `call` tokens of each at a time; after each call gives what was read of each, the state
    and the features of the last token of each lane [b, d] (of those that have ended, where they did)."""
    state = model.initial_state(len(samples)) if state is None else state
    lengths = np.array([1 + sample.tokens for sample in samples])
    last = torch.zeros(len(samples), model.config.width, device=model.device, dtype=model.dtype)
    for first in range(position, int(lengths.max()), call):
        counts = np.clip(lengths - first, 0, call)
        width = int(counts.max())
        tokens = np.full((len(samples), width), bos, dtype=np.int64)
        for row, sample in enumerate(samples):  # position 0 is BOS, so position p is the sample's id p - 1
            begin = int(first == 0)
            ids = sample.read(first + begin - 1, first + int(counts[row]) - 1)
            tokens[row, begin : begin + len(ids)] = ids
        given = torch.from_numpy(tokens).to(model.device)
        ragged = None if counts.min() == width else torch.from_numpy(counts).to(model.device)
        hidden, state = model(given, state, lengths=ragged)
        ends = torch.from_numpy(np.maximum(counts, 1) - 1).to(model.device)
        here = torch.from_numpy(counts > 0).to(model.device)[:, None]
        last = torch.where(here, hidden[torch.arange(len(samples), device=model.device), ends], last)
        yield first + width, state, last


def generate(model: PMI, state: State, last: Tensor, count: int) -> list[list[int]]:
    """The likeliest `count` ids behind each lane."""
    found = []
    for _ in range(count):
        token = model.head.logits(last).argmax(-1)
        found.append(token)
        hidden, state = model(token[:, None], state)
        last = hidden[:, 0]
    return torch.stack(found, 1).tolist()


def spoken(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The answer in generated ids: the first line."""
    return tokenizer.decode(ids).split("\n")[0].strip()


class Evaluation:
    """One checkpoint on one folder of tasks, into one folder of results."""

    def __init__(self, checkpoint: Checkpoint, tasks: Tasks, out: Path, lanes: int, call_segments: int, console: Console) -> None:
        self.model, self.tokenizer, self.tasks, self.out = checkpoint.model, checkpoint.tokenizer, tasks, out
        self.lanes, self.call, self.console = lanes, call_segments * checkpoint.model.config.segment, console
        if tasks.tokenizer.fingerprint() != checkpoint.tokenizer.fingerprint():
            raise UserError(
                f"{tasks.folder}: made with tokenizer {tasks.tokenizer.fingerprint()}, the model's is "
                f"{checkpoint.tokenizer.fingerprint()}; make the tasks with `pmi babilong make --checkpoint DIR`"
            )
        self.identity = Identity(checkpoint.fingerprint, checkpoint.tokenizer.fingerprint())
        claim(out, {"checkpoint": checkpoint.fingerprint, "tasks": tasks.fingerprint()}, tasks.facts())
        lines = (out / ANSWERS).read_text().splitlines() if (out / ANSWERS).is_file() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]
        write_atomically(out / ANSWERS, "".join(json.dumps(row) + "\n" for row in self.rows).encode())

    def run(self, sets: list[tuple[str, str]], most: int | None = None) -> dict[str, Any]:
        """Answer what is not answered yet of the first `most` samples of each set; the report of all of `sets`."""
        done = {(row["task"], row["length"], row["sample"]) for row in self.rows}
        todo: list[tuple[str, str, list[tuple[int, Sample]]]] = []
        for task, length in sets:
            samples = list(enumerate(self.tasks.samples(task, length)))[:most]
            todo.append((task, length, [entry for entry in samples if (task, length, entry[0]) not in done]))
        total = sum(sample.tokens for _, _, entries in todo for _, sample in entries)
        with (
            progress(self.console, "reading", total, "tokens") as advance,
            (self.out / ANSWERS).open("a", buffering=1) as answers,
            torch.inference_mode(),
        ):
            for task, length, entries in todo:
                for first in range(0, len(entries), self.lanes):
                    for row in self._answer(task, length, entries[first : first + self.lanes], advance):
                        answers.write(json.dumps(row) + "\n")
                        self.rows.append(row)
                    shutil.rmtree(self.out / STREAM, ignore_errors=True)
        return self.report(sets, most)

    def _answer(
        self, task: str, length: str, entries: list[tuple[int, Sample]], advance: Callable[[int, str], None]
    ) -> Iterator[dict[str, Any]]:
        samples = [sample for _, sample in entries]
        key = {"task": task, "length": length, "samples": [number for number, _ in entries]}
        read, state = self._restored(key)
        last = torch.empty(0)
        advance(len(samples) * read, f"{task} {length}")
        saved = time.monotonic()
        for position, after, features in read_streams(self.model, samples, self.tokenizer.bos, self.call, state, read):
            state, last = after, features
            advance(len(samples) * (position - read), f"{task} {length}")
            read = position
            if time.monotonic() - saved > SAVE_EVERY and bool((state.position == position).all()):
                self._save(key, state, position)
                saved = time.monotonic()
        assert state is not None  # every sample has its BOS to read
        wanted = [self.tokenizer.encode(sample.answer + "\n") for sample in samples]
        ids = generate(self.model, state, last, max(map(len, wanted)))
        for (number, sample), found in zip(entries, ids, strict=True):
            said = spoken(self.tokenizer, found)
            yield {
                "task": task, "length": length, "sample": number, "tokens": sample.tokens, "question": sample.question,
                "answer": sample.answer, "said": said, "right": said == sample.answer,
            }  # fmt: skip

    # --- the state of samples that are being read ----------------------------------------------------------------

    def _save(self, key: dict[str, Any], state: State, position: int) -> None:
        if position % self.model.config.segment:
            return
        folder = self.out / STREAM
        folder.mkdir(exist_ok=True)
        (folder / "at.json").unlink(missing_ok=True)  # never a mixture of two saves
        for lane in range(state.lanes):
            write_atomically(folder / f"{lane}.snapshot", dump(self.model, state, lane, self.identity))
        write_atomically(folder / "at.json", json.dumps({**key, "position": position}).encode())

    def _restored(self, key: dict[str, Any]) -> tuple[int, State | None]:
        path = self.out / STREAM / "at.json"
        kept = json.loads(path.read_text()) if path.is_file() else {}
        if any(kept.get(name) != value for name, value in key.items()):
            return 0, None
        try:
            files = [self.out / STREAM / f"{lane}.snapshot" for lane in range(len(key["samples"]))]
            lanes = [load_snapshot(self.model, file.read_bytes(), self.identity) for file in files]
        except (SnapshotError, OSError):  # of no use: read again from the start
            return 0, None
        return kept["position"], State.concatenate(lanes)

    # --- report --------------------------------------------------------------------------------------------------

    def report(self, sets: list[tuple[str, str]], most: int | None = None) -> dict[str, Any]:
        """Accuracy by task and length with Wilson intervals; written to report.json and report.png."""
        results = []
        curves: dict[str, Curve] = {}
        for task, length in sets:
            rows = [row for row in self.rows if (row["task"], row["length"]) == (task, length)]
            rows = [row for row in rows if most is None or row["sample"] < most]
            right, count = sum(row["right"] for row in rows), len(rows)
            if not count:
                continue
            low, high = wilson(right, count)
            usual, often = Counter(row["answer"] for row in rows).most_common(1)[0]
            results.append({
                "task": task, "length": length, "samples": count, "right": right, "accuracy": right / count,
                "low": low, "high": high, "usual_answer": usual, "usual_share": often / count,
                "tokens": sum(row["tokens"] for row in rows),
            })  # fmt: skip
            curves.setdefault(task, Curve(task)).add(length, right, count)
        result = {
            "checkpoint": self.identity.model, "tasks": self.tasks.fingerprint(), "made": self.tasks.manifest,
            "protocol": "each sample one session from an empty state, memory and window carried; greedy; exact match of the "
            "answer's line; 95 % Wilson intervals; usual_share: what always giving the set's usual answer would score",
            "results": results,
        }  # fmt: skip
        write_atomically(self.out / REPORT, (json.dumps(result, indent=2) + "\n").encode())
        places = list(dict.fromkeys(length for _, length in sets))
        largest = [entry for entry in results if entry["samples"] > 1] or results
        chance = sum(entry["usual_share"] * entry["samples"] for entry in largest) / sum(entry["samples"] for entry in largest)
        draw(
            list(curves.values()),
            places,
            chance,
            "usual answer",
            "BABILong, exact match",
            "tokens of context",
            self.out / PICTURE,
        )
        return result
