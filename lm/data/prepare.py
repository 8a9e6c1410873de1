"""`pmi data prepare`: from a source to a prepared folder; interrupted, it goes on from the shards that are finished.

    pmi data prepare enwik8 --source enwik8.gz --out data/enwik8

While it runs, DIR/.work holds the staged text and a record per finished shard; the manifest is written last.
"""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets

from lm.data.files import write_atomically
from lm.data.originals import ORIGINALS, Original, differences
from lm.data.pieces import TYPES, PieceTokenizer
from lm.data.prepared import MANIFEST, SPLITS, WORK, Manifest, Split, open_prepared, read_manifest
from lm.data.shards import text_of, write_shards
from lm.data.staging import Planned, Span, Staged, assign, stage, sums_by_split
from lm.data.tokenizer import FILE as TOKENIZER
from lm.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, tokenizer_kinds
from lm.data.words import WordTokenizer
from lm.errors import UserError

LISTED_FILES = 1000
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@dataclass(frozen=True)
class Request:
    """What the user asks for; the manifest keeps it."""

    dataset: str
    out: Path
    source: Path | None = None
    tokenizer: str | None = None
    """bytes, words, pieces, or a folder that has a tokenizer; None: the data set's own."""
    vocab_size: int = 32_000
    model_type: str = "unigram"
    sample_megabytes: int = 32
    """How much of the training split SentencePiece learns from."""
    articles: bool = False
    split: str | None = None
    holdout: float | None = None
    """The share of validation and of test, where a text without split folders is cut."""
    pattern: str | None = None
    processes: int | None = None
    downloads: Path = Path("~/.cache/pmi")

    def remembered(self) -> dict[str, Any]:
        """The part that decides the result, JSON-able."""
        fields = asdict(self)
        for name in ("out", "processes", "downloads"):
            del fields[name]
        return fields | {"source": str(self.source.resolve()) if self.source else None}

    def problems(self) -> Iterator[str]:
        """Everything that is wrong with it."""
        if self.dataset not in ORIGINALS:
            yield f"data set {self.dataset!r} is unknown; allowed: {', '.join(ORIGINALS)}"
        elif self.source is None and ORIGINALS[self.dataset].fetch is None:
            yield f"{self.dataset}: needs --source, a file or folder of yours"
        if self.source is not None and not self.source.exists():
            yield f"--source {self.source}: there is no such file or folder"
        if self.out.exists() and not self.out.is_dir():
            yield f"--out {self.out}: is a file; name a folder"
        if self.articles and not self.dataset.startswith("wikitext"):
            yield f"--articles: only for wikitext103 and wikitext2, not {self.dataset}"
        kinds = sorted(tokenizer_kinds())
        if self.tokenizer is not None and self.tokenizer not in kinds and not (Path(self.tokenizer) / TOKENIZER).is_file():
            yield f"--tokenizer {self.tokenizer!r}: neither one of {', '.join(kinds)} nor a folder with a {TOKENIZER}"
        elif self.dataset == "enwik8" and self.tokenizer not in (None, "bytes"):
            yield f"--tokenizer {self.tokenizer!r}: enwik8 is cut inside characters; allowed: bytes"
        if self.model_type not in TYPES:
            yield f"--model-type {self.model_type!r}: unknown; allowed: {', '.join(TYPES)}"
        if self.split is not None and self.split not in SPLITS:
            yield f"--split {self.split!r}: unknown; allowed: {', '.join(SPLITS)}"
        if self.holdout is not None and self.dataset != "text":
            yield f"--holdout {self.holdout}: only for text, not {self.dataset}"
        elif self.holdout is not None and self.split is not None:
            yield f"--holdout {self.holdout}: not together with --split, which leaves nothing to hold out; give one of them"
        elif self.holdout is not None and not 0 <= self.holdout < 0.5:
            yield f"--holdout {self.holdout}: must be at least 0 and below 0.5"
        for name in ("vocab_size", "sample_megabytes", "processes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                yield f"--{name.replace('_', '-')} {value}: must be at least 1"


def prepare(request: Request, force: bool = False, say: Callable[[str], None] = lambda line: None) -> Manifest:
    """Prepare the data and return the manifest of the folder; `say` gets a line for each step."""
    with _explaining(request.out):
        if problems := list(request.problems()):
            raise UserError(problems)
        done = _already(request, force)
        if done is None:
            return _prepared_anew(request, say)
        say(f"{request.out}: prepared already, nothing to do; with --force it is prepared anew, should the source have changed")
        return done


def _prepared_anew(request: Request, say: Callable[[str], None]) -> Manifest:
    out, original = request.out, ORIGINALS[request.dataset]
    if not sys.stderr.isatty():  # a log is better off with the lines of `say` alone
        datasets.disable_progress_bars()
    with _working_in(out) as work:
        source = request.source
        if source is None:
            assert original.fetch is not None
            source = original.fetch(request.downloads.expanduser())
        say(f"reading {source}")
        pattern = request.pattern or original.pattern
        try:
            staged = stage(source, work / "staged", pattern, articles=request.articles, utf8=original.utf8)
            sums = sums_by_split(staged, original)
            differences(original, sums, {})
        except Exception as error:
            if request.source is None and source.is_file() and any(isinstance(cause, UserError) for cause in _causes(error)):
                source.unlink()  # a damaged download must not be met again
            raise
        if staged.empty:
            more = f" and {len(staged.empty) - 3:,} more" if staged.empty[3:] else ""
            say(f"left out, without text: {', '.join(staged.empty[:3])}{more}")
        splits = assign(staged, original, source, pattern, request.split, request.holdout)
        tokenizer = _tokenizer(request, original, staged, splits, work, say)
        (out / MANIFEST).unlink(missing_ok=True)  # with --force: from here on the folder is not whole
        tokenizer.save(out)
        documents = [document for planned in splits.values() for document in planned]
        say(f"tokenizing {len(documents):,} documents, {sum(document.bytes for document in documents) / 1e6:,.1f} MB")
        done_splits = write_shards(out, staged, splits, tokenizer, _processes(request))
        counts = _counts(request, original, tokenizer, done_splits)
        found = differences(original, sums, counts)
        if missing := [name for name in original.required if name not in done_splits]:
            found.append(f"no {', '.join(missing)} split")
        listed = list(staged.files.items())[:LISTED_FILES]
        manifest = Manifest(
            dataset=request.dataset,
            request=request.remembered(),
            source={name: sum_._asdict() for name, sum_ in [*listed, ("all", sums["all"])]},
            partial=bool(found),
            differences=found,
            tokenizer=tokenizer.fingerprint(),
            vocab_size=tokenizer.vocab_size,
            dtype=tokenizer.dtype.name,
            splits=done_splits,
        )
        _remove_strangers(out, manifest)
        write_atomically(out / MANIFEST, (manifest.model_dump_json(indent=2) + "\n").encode())
        del staged
    shutil.rmtree(work)
    return manifest


def _counts(request: Request, original: Original, tokenizer: Tokenizer, splits: dict[str, Split]) -> dict[str, dict[str, int]]:
    """The counts by which the original is known; of tokens and types only those of the original's own tokenizer."""
    counts: dict[str, dict[str, int]] = {name: {"words": split.words} for name, split in splits.items()}
    for name, split in splits.items():
        if not request.articles:
            counts[name]["documents"] = split.documents
        if tokenizer.kind == original.tokenizer:
            counts[name]["tokens"] = split.tokens
    if tokenizer.kind == original.tokenizer and "train" in splits:
        counts["train"]["types"] = tokenizer.vocab_size - 1
    return counts


def _already(request: Request, force: bool) -> Manifest | None:
    """The manifest of a folder that this very request has made; UserError where the folder holds something else."""
    out, path = request.out, request.out / MANIFEST
    if not path.is_file():
        if out.is_dir() and any(out.iterdir()) and not (out / WORK).is_dir():
            raise UserError(f"--out {out}: holds other files; name an empty or new folder")
        return None
    if force:
        return None
    manifest = read_manifest(out)
    if manifest.request == request.remembered():
        shutil.rmtree(out / WORK, ignore_errors=True)  # left where a run ended just after its manifest
        return open_prepared(out).manifest
    changed = {key: value for key, value in manifest.request.items() if request.remembered().get(key) != value}
    raise UserError(f"--out {out}: holds data prepared with {changed}; name another folder, or replace it with --force")


@contextmanager
def _working_in(out: Path) -> Iterator[Path]:
    """The folder of work in progress, for one process at a time; the staged text does not outlive the run."""
    work = out / WORK
    work.mkdir(parents=True, exist_ok=True)
    with (work / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"--out {out}: another `pmi data prepare` is writing there; wait for it to end") from error
        shutil.rmtree(work / "staged", ignore_errors=True)  # of a run that was killed
        try:
            yield work
        finally:
            shutil.rmtree(work / "staged", ignore_errors=True)


@contextmanager
def _explaining(out: Path) -> Iterator[None]:
    """A user's mistake found inside `datasets`, or a full disk, comes out as a UserError."""
    try:
        yield
    except Exception as error:
        for cause in _causes(error):
            if isinstance(cause, UserError | KeyboardInterrupt):  # `datasets` turns Ctrl-C into a time-out of its own
                raise cause from None
            full = isinstance(cause, OSError) and (cause.errno in FULL_DISK or "disk space" in str(cause))
            if full:
                free = shutil.disk_usage(out if out.exists() else Path()).free
                raise UserError(
                    f"--out {out}: the disk is full or a file may not grow ({free >> 20:,} MB free); make room and run "
                    "the same command again: finished shards are kept"
                ) from error
            if isinstance(cause, OSError) and cause.filename is not None:
                raise UserError(f"{cause.filename}: {cause.strerror}; mend that or name another place") from error
            if isinstance(cause, MemoryError) or "abruptly died" in str(cause):  # so `datasets` says of a killed process
                raise UserError(
                    "a process that tokenizes was killed, most often for want of memory; run the same command again with "
                    "fewer --processes: finished shards are kept"
                ) from error
        raise


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what lies under it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _tokenizer(
    request: Request,
    original: Original,
    staged: Staged,
    splits: dict[str, list[Planned]],
    work: Path,
    say: Callable[[str], None],
) -> Tokenizer:
    """The tokenizer asked for: loaded, or learned from the training split (once: an interrupted run keeps it)."""
    kind = request.tokenizer or original.tokenizer
    if kind == "bytes":
        return ByteTokenizer()
    if kind not in tokenizer_kinds():
        return load_tokenizer(Path(kind))
    if "train" not in splits:
        raise UserError(f"--tokenizer {kind}: there is no train split to learn it from; give --tokenizer FOLDER")
    spans = [span for document in splits["train"] for span in document.spans]
    options: list[Any] = [kind]
    if kind == "pieces":
        spans = _sample(spans, request.sample_megabytes << 20)
        options += [request.vocab_size, request.model_type]
    digest = hashlib.sha256(json.dumps(options).encode())
    for span in spans:
        digest.update(text_of(staged.blocks, span))
    key, kept = digest.hexdigest(), work / "tokenizer"
    if (kept / "key").is_file() and (kept / "key").read_text() == key:
        return load_tokenizer(kept)
    size = sum(span.stop - span.start for span in spans)
    contents = (text_of(staged.blocks, span).decode("utf-8", errors="replace") for span in spans)
    tokenizer: Tokenizer
    if kind == "words":
        say(f"building the word vocabulary from {size / 1e6:,.1f} MB")
        tokenizer = WordTokenizer.build(contents)
    else:
        say(f"training SentencePiece ({request.model_type}, {request.vocab_size:,} pieces) on {size / 1e6:,.1f} MB")
        tokenizer = PieceTokenizer.train(contents, request.vocab_size, request.model_type, _processes(request))
    tokenizer.save(kept)
    write_atomically(kept / "key", key.encode())
    return tokenizer


def _sample(spans: list[Span], limit: int) -> list[Span]:
    """Spans from all over the split, in an order that is always the same, up to `limit` bytes."""
    if sum(span.stop - span.start for span in spans) <= limit:
        return spans
    chosen: list[Span] = []
    for span in sorted(spans, key=lambda span: hashlib.sha256(repr(span).encode()).digest()):
        if limit <= 0:
            break
        chosen.append(span)
        limit -= span.stop - span.start
    return chosen


def _remove_strangers(out: Path, manifest: Manifest) -> None:
    """Remove shards and indexes of an earlier attempt that this manifest does not name."""
    named = {shard.file for split in manifest.splits.values() for shard in split.shards}
    named |= {f"{name}.{end}" for name in manifest.splits for end in ("index.npy", "names.txt")}
    for name in SPLITS:
        for path in [*out.glob(f"{name}-?????.bin"), out / f"{name}.index.npy", out / f"{name}.names.txt"]:
            if path.name not in named:
                path.unlink(missing_ok=True)


def _processes(request: Request) -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return request.processes or cores
