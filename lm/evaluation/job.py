"""An evaluation as a whole: which passes it takes, run here or on a Ray cluster, and the result that is reported.

    result = Job(checkpoint, corpus, Options(modes=["on", "shuffled"])).run(watcher)

A pass reads all documents in one memory mode. `shuffled` also needs `on`; where there is one document, both run over parts of it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any, Protocol

import torch

from lm.errors import UserError
from lm.evaluation import alarm
from lm.evaluation.corpus import Corpus, Item
from lm.evaluation.figures import Figures, by_position, difference, figures, why_no_interval
from lm.evaluation.journal import Journal
from lm.evaluation.stream import CALL_TOKENS, Open, StoppedError, Watch, evaluate
from lm.evaluation.tally import Outcome
from lm.evaluation.variants import MEANING, Mode, refuse_without_memory, variant
from lm.model import PMI
from lm.model.pretrained import Checkpoint
from lm.model.snapshot import Identity

PARTS = 64
"""Contiguous parts that a single document is cut into, to shuffle memory between them."""
LEAST_SEGMENTS = 2
"""Segments of a part: memory is first read in the second."""


@dataclass(frozen=True)
class Options:
    """What the user can choose. Only `modes`, `segment`, `window` and `dtype` change what is computed."""

    modes: Sequence[Mode] = ("on",)
    segment: int | None = None
    window: int | None = None
    dtype: str = "float32"
    lanes: int | None = None
    call_tokens: int = CALL_TOKENS
    out: Path | None = None


@dataclass(frozen=True)
class Pass:
    """All documents (or parts) read in one mode."""

    name: str
    mode: Mode
    items: list[Item]
    parts: bool = False

    @property
    def tokens(self) -> int:
        """Tokens of all its documents."""
        return sum(item.length for item in self.items)


@dataclass(frozen=True)
class Result:
    """Everything that is reported."""

    protocol: dict[str, Any]
    figures: dict[str, Figures]
    """By pass."""
    positions: dict[str, list[dict[str, float]]]
    differences: dict[str, dict[str, Any]]
    """By pass: how much worse it was than carried memory on the same documents, and whether that is sure."""
    leak_alarm: alarm.Alarm
    notes: list[str]

    def row(self) -> dict[str, Any]:
        """As JSON."""
        passes = {name: {**found.row(), "by_position": self.positions[name]} for name, found in self.figures.items()}
        return {
            "protocol": self.protocol,
            "passes": passes,
            "differences": self.differences,
            "leak_alarm": self.leak_alarm.row(),
            "notes": self.notes,
        }


class Runner(Protocol):
    """What reads the documents of a pass: this process, or a cluster."""

    def __call__(self, job: "Job", model: PMI, part: Pass, watch: Watch, resume: list[Open], finished: set[int]) -> None: ...


def here(job: "Job", model: PMI, part: Pass, watch: Watch, resume: list[Open], finished: set[int]) -> None:
    """Read a pass in this process."""
    options = job.options
    evaluate(model, part.items, part.mode, job.bos, watch, options.lanes, options.call_tokens, resume, finished)


@dataclass
class Listener:
    """Who follows a job."""

    started: Callable[[Pass, int], None] = lambda part, tokens: None
    """A pass begins; so many of its tokens were read before."""
    advanced: Callable[[int], None] = lambda tokens: None
    document: Callable[[Pass, Outcome], None] = lambda part, outcome: None
    failed: Callable[[], None] = lambda: None
    """A worker was lost."""
    stop: Callable[[], bool] = field(default=lambda: False)


class Job:
    """A checkpoint on a corpus, in some memory modes."""

    def __init__(self, checkpoint: Checkpoint, corpus: Corpus, options: Options) -> None:
        refuse_without_memory(checkpoint, list(options.modes))
        self.checkpoint, self.corpus, self.options = checkpoint, corpus, options
        self.bos = checkpoint.tokenizer.bos
        self.model = variant(checkpoint, True, options.segment, options.window, options.dtype)
        self.segment = self.model.config.segment
        self.passes = self._passes()
        self.journal = Journal(options.out, self.about())

    def _passes(self) -> list[Pass]:
        items, modes = self.corpus.items, list(dict.fromkeys(self.options.modes))
        passes = [Pass(mode, mode, items) for mode in modes if mode != "shuffled"]
        if "shuffled" not in modes:
            return passes
        if len(items) > 1:
            on = [] if "on" in modes else [Pass("on", "on", items)]
            return [*on, *passes, Pass("shuffled", "shuffled", items)]
        segments = items[0].segments(self.segment)
        parts = items[0].parts(min(PARTS, segments // LEAST_SEGMENTS), self.segment) if segments >= 2 * LEAST_SEGMENTS else []
        if len(parts) < 2:
            raise UserError(
                f"--memory shuffled: {items[0].name} has {segments} segments of {self.segment} tokens; shuffling needs two "
                f"documents, or one of {2 * LEAST_SEGMENTS} segments; give a longer text or a smaller --segment"
            )
        name = f"{len(parts)} parts"
        return [*passes, Pass(f"on, {name}", "on", parts, True), Pass(f"shuffled, {name}", "shuffled", parts, True)]

    def about(self) -> dict[str, Any]:
        """What the figures are a function of: the identity of the evaluation, and its protocol."""
        config, corpus = self.model.config, self.corpus
        return {
            "version": version("pmi-lm"),
            "model": self.checkpoint.fingerprint,
            "tokenizer": f"{self.checkpoint.tokenizer.kind} {self.checkpoint.tokenizer.fingerprint()}",
            "data": corpus.name,
            "data_fingerprint": corpus.fingerprint,
            "documents": len(corpus.items),
            "tokens": corpus.tokens,
            "segment": config.segment,
            "window": config.window,
            "trained_with": {"segment": self.checkpoint.model.config.segment, "window": self.checkpoint.model.config.window},
            "dtype": self.options.dtype,
            "documents_fingerprint": _fingerprint(corpus.items),
        }

    def model_of(self, mode: Mode) -> PMI:
        """The model that a mode reads with."""
        options = self.options
        return self.model if mode != "off" else variant(self.checkpoint, False, options.segment, options.window, options.dtype)

    def run(self, listener: Listener | None = None, runner: Runner = here) -> Result:
        """Run every pass that is not done; StoppedError (with all work kept) where the listener asks for it."""
        listener = listener or Listener()
        for part in self.passes:
            self._run_pass(part, listener, runner)
        return self.result()

    def _run_pass(self, part: Pass, listener: Listener, runner: Runner) -> None:
        model, journal = self.model_of(part.mode), self.journal
        identity = Identity(
            f"{self.checkpoint.fingerprint} {part.name} {self.segment} {model.config.window} {self.options.dtype}",
            self.checkpoint.tokenizer.fingerprint(),
        )
        finished = set(journal.outcomes.get(part.name, {}))
        lanes = 2 if part.mode == "shuffled" else 1
        resume = journal.opened(part.name, model, identity, part.items, lanes) if runner is here else []
        before = sum(item.length for item in part.items if item.number in finished) + sum(x.tally.tokens_done for x in resume)
        listener.started(part, before)
        journal.begin()
        if len(finished) == len(part.items):
            return

        def done(outcome: Outcome) -> None:
            journal.add(part.name, outcome)
            listener.document(part, outcome)

        def save(opened: Callable[[], list[Open]]) -> None:
            if journal.due():
                journal.save(part.name, model, identity, opened())

        try:
            runner(self, model, part, Watch(done, listener.advanced, listener.stop, save, listener.failed), resume, finished)
        except StoppedError as stopped:
            with torch.inference_mode():
                journal.save(part.name, model, identity, stopped.open)
            raise
        missing = [item.name for item in part.items if item.number not in journal.outcomes[part.name]]
        if missing:  # never a silently smaller denominator
            raise RuntimeError(f"{part.name}: {len(missing)} documents were not read, the first is {missing[0]}")

    def outcomes(self, name: str) -> list[Outcome]:
        """The documents of a pass, in order."""
        found = self.journal.outcomes[name]
        return [found[number] for number in sorted(found)]

    def result(self) -> Result:
        """The figures of all passes, when all are done; also written to the journal's folder."""
        characters = self.corpus.characters()
        found: dict[str, Figures] = {}
        firsts: dict[bool, dict[Mode, list[Outcome]]] = {False: {}, True: {}}
        for part in self.passes:
            outcomes = self.outcomes(part.name)
            read = figures(outcomes, None if part.parts else characters, self.journal.seconds.get(part.name, 0.0))
            if part.parts and read.interval is not None:
                read = replace(read, documents=1, interval=replace(read.interval, over="parts"))
            found[part.name] = read
            firsts[part.parts][part.mode] = outcomes
        alarms = [
            alarm.check(self.model, self.corpus.items, self.bos, firsts[False]),
            *([alarm.check(self.model, self._parts(), self.bos, firsts[True])] if firsts[True] else []),
        ]
        joined = alarm.Alarm(
            sum(x.documents for x in alarms), sum(x.across for x in alarms), [leak for x in alarms for leak in x.leaks]
        )
        positions = {part.name: by_position(self.outcomes(part.name)) for part in self.passes}
        notes = [*self.corpus.notes, *dict.fromkeys(line for x in found.values() for line in why_no_interval(x, self.segment))]
        if self.checkpoint.model.config.memory is None:
            notes.append("this checkpoint was trained without memory: there is none to carry, and on and off are the same")
        result = Result(self.protocol(), found, positions, self._differences(), joined, notes)
        self.journal.finish(result.row())
        return result

    def _parts(self) -> list[Item]:
        return next(part.items for part in self.passes if part.parts)

    def protocol(self) -> dict[str, Any]:
        """What is printed beside every number."""
        corpus = self.corpus
        return {
            **self.about(),
            "prediction": "every token predicted once, position 0 (BOS) never",
            "streams": {part.name: self._streams(part) for part in self.passes},
            "modes": {part.name: _meaning(part) for part in self.passes},
            "sums": "float64",
            "words_are": corpus.words_are,
            "unknown_rate": corpus.unknown / corpus.tokens if corpus.tokenizer.unknown is not None else None,
            "comparable": not corpus.not_comparable,
            "not_comparable": corpus.not_comparable,
        }

    def _streams(self, part: Pass) -> str:
        if part.parts:
            return f"one document in {len(part.items)} parts, each read from a start of its own"
        return (
            "one carried stream, which cannot be split"
            if len(part.items) == 1
            else f"{len(part.items):,} documents, each carried from its start"
        )

    def _differences(self) -> dict[str, dict[str, Any]]:
        found = {}
        for part in self.passes:
            on = next((other for other in self.passes if other.mode == "on" and other.parts == part.parts), None)
            if on is not None and part.mode != "on":
                gap = difference(self.outcomes(part.name), self.outcomes(on.name))
                over = "parts" if part.parts else gap.over
                found[part.name] = {**asdict(gap), "over": over, "worse": gap.worse, "mode": part.mode, "against": on.name}
        return found


def _meaning(part: Pass) -> str:
    return MEANING[part.mode].replace("document", "part") if part.parts else MEANING[part.mode]


def _fingerprint(items: Sequence[Item]) -> str:
    """A short hash of which documents are read."""
    return hashlib.sha256("\0".join(f"{item.number} {item.name}" for item in items).encode()).hexdigest()[:16]
