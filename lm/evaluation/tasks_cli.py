"""The commands `pmi babilong make`, `eval`, `train` and `pmi recall`: tasks that need a memory."""

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from lm.commands import Commands, Device, Seed, Set, stderr, stdout
from lm.errors import UserError, collecting, noting

babilong_app = Commands(help="BABILong: bAbI facts hidden in long text. Make the tasks, train on them, measure a model on them.")

Facts = Annotated[Path, typer.Option(help="bAbI: a folder or archive with files such as qa1_train.txt.")]
Text = Annotated[Path, typer.Option(help="The books that facts are hidden in: prepared data, or a folder or archive of .txt.")]
TaskNames = Annotated[str, typer.Option("--tasks", help="bAbI tasks, such as qa1,qa2.")]
Lanes = Annotated[int, typer.Option(help="Samples read side by side.", min=1)]


def mount(app: Commands) -> None:
    """Add the commands to `app`."""
    app.add_typer(babilong_app, name="babilong")
    app.command(epilog="Example: pmi recall --pairs 8 --distances 1,8,64 --out runs/recall   (window only: --memory off)")(recall)


@babilong_app.command(
    epilog="Example: pmi babilong make --facts babi.tar.xz --text data/pg19 --tasks qa1,qa2 --lengths 0k,4k,1M --out tasks"
)
def make(
    facts: Facts,
    text: Text,
    out: Annotated[Path, typer.Option(help="Folder to write; run again to go on, or to add tasks and lengths.")],
    tasks: TaskNames = "qa1,qa2,qa3,qa4,qa5",
    lengths: Annotated[str, typer.Option(help="Tokens of context: 0k (facts alone) to 10M.")] = "0k,1k,2k,4k,8k,16k,32k,64k",
    samples: Annotated[int, typer.Option(help="Samples of each task at each length (from 10M on: one).", min=1)] = 100,
    split: Annotated[str, typer.Option(help="Of bAbI: train, valid or test.")] = "test",
    text_split: Annotated[
        str | None, typer.Option(help="Of the books: train, validation, test, dev. Default: as --split.")
    ] = None,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Count in this model's tokens (a model or prepared-data folder). Default: bytes.")
    ] = None,
    seed: Seed = 0,
) -> None:
    """Hide the facts of bAbI stories in books, at lengths from nothing to ten million tokens."""
    from lm.data.prepared import SPLITS
    from lm.data.tokenizer import ByteTokenizer, load_tokenizer
    from lm.evaluation import babilong_tasks
    from lm.evaluation.babilong import BOOKS

    with collecting() as problems:
        names, sizes = _tasks(tasks, problems), _lengths(lengths, problems)
        if split not in BOOKS:
            problems.append(f"--split {split!r}: must be one of {', '.join(BOOKS)}")
        if text_split is not None and text_split not in SPLITS:
            problems.append(f"--text-split {text_split!r}: must be one of {', '.join(SPLITS)}")
        with noting(problems):
            tokenizer = ByteTokenizer() if checkpoint is None else load_tokenizer(checkpoint)
        problems.extend(f"{path}: there is no such file or folder" for path in (facts, text) if not path.exists())
    notes = babilong_tasks.make(facts, text, names, list(sizes), samples, seed, split, tokenizer, out, stderr, text_split)
    for note in notes:
        stderr.print(f"note: {note}", markup=False, soft_wrap=True)
    made = babilong_tasks.Tasks(out)
    stdout.print(f"{out}: {', '.join(f'{task} {length}' for task, length in made.sets)}", highlight=False, soft_wrap=True)


@babilong_app.command("eval", epilog="Example: pmi babilong eval --checkpoint runs/x/model --tasks tasks/babilong")
def evaluate(
    checkpoint: Annotated[Path, typer.Option(help="A model folder.")],
    tasks: Annotated[Path, typer.Option(help="A folder that `pmi babilong make` wrote.")],
    out: Annotated[Path | None, typer.Option(help="Where results go. Default: TASKS/results/FINGERPRINT.")] = None,
    only: Annotated[str | None, typer.Option(help="Only these tasks, such as qa1,qa2.")] = None,
    lengths: Annotated[str | None, typer.Option(help="Only these lengths, such as 0k,4k.")] = None,
    samples: Annotated[int | None, typer.Option(help="Only the first so many samples of each task and length.", min=1)] = None,
    lanes: Lanes = 8,
    segments: Annotated[int, typer.Option(help="Segments of each lane in one call.", min=1)] = 16,
    device: Device = "auto",
) -> None:
    """Read each sample as a session, answer greedily, and report exact matches by task and length.

    Memory use does not grow with length. Interrupted, the same command goes on, within a long sample too.
    """
    from lm.evaluation.babilong_eval import Evaluation
    from lm.evaluation.babilong_tasks import Tasks
    from lm.model.pretrained import from_pretrained, resolve_device

    with collecting() as problems:
        with noting(problems):
            target = resolve_device(device)
        wanted = None if only is None else _tasks(only, problems)
        sizes = None if lengths is None else _lengths(lengths, problems)
        with noting(problems):
            folder = Tasks(tasks)
        with noting(problems):
            loaded = from_pretrained(checkpoint)
    chosen = [(t, n) for t, n in folder.sets if (wanted is None or t in wanted) and (sizes is None or n in sizes)]
    if not chosen:
        has = ", ".join(f"{task} {length}" for task, length in folder.sets)
        raise UserError(f"{tasks}: nothing there of --only {only} --lengths {lengths}; it has {has}")
    loaded.model.to(target)
    results = out or tasks / "results" / loaded.fingerprint
    report = Evaluation(loaded, folder, results, lanes, segments, stderr).run(chosen, samples)
    table = Table("task", "length", "samples", "exact match", "95 %", "usual answer", title=f"BABILong: {checkpoint}")
    for row in report["results"]:
        interval = f"{row['low']:.3f}-{row['high']:.3f}"
        usual = f"{row['usual_share']:.3f} ({row['usual_answer']})"
        table.add_row(row["task"], row["length"], str(row["samples"]), f"{row['accuracy']:.3f}", interval, usual)
    stdout.print(table)
    stdout.print(report["protocol"], highlight=False)
    stdout.print(f"{results}: report.json, report.png, answers.jsonl", highlight=False, soft_wrap=True)


@babilong_app.command(
    epilog="Example: pmi babilong train --facts babi.tar.xz --text data/pg19 --tasks qa1 --lengths 0k,1k,4k --out runs/qa1"
)
def train(
    facts: Facts,
    text: Text,
    out: Annotated[Path, typer.Option(help="The run's folder; the model is left in OUT/model. Run again to go on.")],
    tasks: TaskNames = "qa1",
    text_split: Annotated[str, typer.Option(help="Of the books: train, validation, test or dev.")] = "train",
    lengths: Annotated[str, typer.Option(help="The curriculum: each length follows when the one before is mastered.")] = "0k,1k",
    checkpoint: Annotated[Path | None, typer.Option(help="Start from this model.")] = None,
    model: Annotated[str, typer.Option(help="Without --checkpoint: a preset, or a file's path.")] = "tiny",
    tokenizer: Annotated[
        Path | None, typer.Option(help="Without --checkpoint: a folder that has a tokenizer. Default: bytes.")
    ] = None,
    set_: Set = [],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 2_000,
    lanes: Lanes = 16,
    tokens: Annotated[
        int | None, typer.Option(help="Most tokens of context in a step: fewer samples, where they are longer.", min=1)
    ] = None,
    asked: Annotated[int, typer.Option(help="Ask each question of a story up to so many times on the way, too.", min=0)] = 0,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", min=1e-8)] = 2e-3,
    everything: Annotated[float, typer.Option(help="Weight of predicting all tokens, beside the answers.", min=0)] = 0.5,
    writing: Annotated[
        float, typer.Option(help="With --asked: weight of writing facts to memory and nothing else.", min=0)
    ] = 0.0,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Train on fresh samples of the train split, at growing lengths."""
    from lm.config import ModelConfig, load_model_config
    from lm.data.prepared import SPLITS
    from lm.data.tokenizer import ByteTokenizer, load_tokenizer
    from lm.evaluation.babilong import Books
    from lm.evaluation.babilong_train import run
    from lm.model.pretrained import Checkpoint, from_pretrained, resolve_device

    with collecting() as problems:
        with noting(problems):
            target = resolve_device(device)
        names, sizes = _tasks(tasks, problems), _lengths(lengths, problems)
        if text_split not in SPLITS:
            problems.append(f"--text-split {text_split!r}: must be one of {', '.join(SPLITS)}")
        problems.extend(f"{path}: there is no such file or folder" for path in (facts, text) if not path.exists())
        with noting(problems):
            start: Checkpoint | ModelConfig = from_pretrained(checkpoint) if checkpoint else load_model_config(model, set_)
            spelling = load_tokenizer(tokenizer) if tokenizer else ByteTokenizer()
            if isinstance(start, Checkpoint):
                spelling = start.tokenizer
            elif start.vocab_size != spelling.vocab_size:
                given = f"{tokenizer or 'bytes'} {spelling.vocab_size}"
                problems.append(f"--model {model}: has {start.vocab_size} ids, {given}; choose a --tokenizer, or --checkpoint")
    books = Books.open(text, text_split)
    outcome = run(
        start, spelling, facts, books, names, list(sizes.values()), steps=steps, lanes=lanes, lr=lr, everything=everything,
        seed=seed, out=out, device=target, console=stderr, asked=asked, tokens=tokens, writing=writing,
    )  # fmt: skip
    if outcome is None:
        _ended()
    else:
        said = f"{outcome['accuracy']:.3f} of the answers' tokens at {outcome['reached']:,} tokens"
        stdout.print(f"{out / 'model'}: {said} (the mean of the last steps of training)", highlight=False, soft_wrap=True)


def recall(
    out: Annotated[Path, typer.Option(help="The run's folder; run the same command again to go on.")],
    pairs: Annotated[int, typer.Option(help="Pairs of key and value to remember.")] = 8,
    queries: Annotated[int, typer.Option(help="Queries of each sample when it is evaluated.")] = 1,
    distractors: Annotated[int, typer.Option(help="Pairs of other keys in each segment between pairs and query.")] = 0,
    distance: Annotated[int, typer.Option(help="Greatest distance that is trained at, in segments.", min=1)] = 8,
    distances: Annotated[str, typer.Option(help="Distances to evaluate at.")] = "1,4,8,16,32,64",
    memory: Annotated[str, typer.Option(help="on, or off: the window alone, same training.")] = "on",
    segment: Annotated[int | None, typer.Option(help="T (default: the model's).", min=4)] = None,
    window: Annotated[int | None, typer.Option(help="W (default: the model's).", min=0)] = None,
    model: Annotated[str, typer.Option(help="A preset or the path of a YAML/JSON file.")] = "recall",
    set_: Set = [],  # noqa: B006
    steps: Annotated[int, typer.Option(help="Training steps.", min=1)] = 300,
    lanes: Annotated[int, typer.Option(help="Samples of a step at distance 1 (fewer where they are longer).", min=1)] = 32,
    lr: Annotated[float, typer.Option(help="Peak learning rate.", min=1e-8)] = 5e-3,
    samples: Annotated[int, typer.Option(help="Samples at each distance.", min=1)] = 512,
    seed: Seed = 0,
    device: Device = "auto",
) -> None:
    """Train and measure recall of key-value pairs across segments: minutes on one core.

    64 keys, 64 values, fresh for each sample: guessing gives 1/64. The query stands DISTANCE segments behind the pairs.
    """
    from lm.config import load_model_config
    from lm.evaluation.recall import recall_tokenizer
    from lm.evaluation.recall_run import Recall, run
    from lm.model.pretrained import resolve_device

    with collecting() as problems:
        with noting(problems):
            target = resolve_device(device)
        places = [part.strip() for part in distances.split(",")]
        if not all(re.fullmatch("[1-9][0-9]*", part) for part in places):
            problems.append(f"--distances {distances!r}: must be segments, 1 or more, such as 1,8,64")
        if memory not in ("on", "off"):
            problems.append(f"--memory {memory!r}: must be on or off")
        changes = [*set_, *([f"segment={segment}"] if segment else []), *([f"window={window}"] if window is not None else [])]
        with noting(problems):
            config = load_model_config(model, [*changes, *(["memory=off"] if memory == "off" else [])])
            if config.vocab_size != recall_tokenizer().vocab_size:
                needs = f"this task has {recall_tokenizer().vocab_size}; add --set vocab_size={recall_tokenizer().vocab_size}"
                problems.append(f"--model {model}: has {config.vocab_size} ids, {needs}")
    settings = Recall(
        config, pairs, queries, distractors, distance, sorted({int(place) for place in places}), steps, lanes, lr, samples, seed
    )
    result = run(settings, out, target, stderr)
    if result is None:
        _ended()
        return
    kind = "memory on" if result["memory"] else "window only"
    table = Table("distance", "asked", "accuracy", "95 %", title=f"recall of {pairs} pairs, {kind} ({result['steps']} steps)")
    for row in result["results"]:
        table.add_row(str(row["distance"]), str(row["asked"]), f"{row['accuracy']:.4f}", f"{row['low']:.4f}-{row['high']:.4f}")
    stdout.print(table)
    stdout.print(f"{result['protocol']}; guessing gives {result['chance']:.4f}", highlight=False)
    stdout.print(f"{out}: report.json, report.png, model", highlight=False, soft_wrap=True)


def _ended() -> None:
    stderr.print("stopped, saved. To go on, run the same command again")
    raise typer.Exit(130)


def _tasks(names: str, problems: list[str]) -> list[str]:
    found = list(dict.fromkeys(name.strip() for name in names.split(",")))
    for name in found:
        if not re.fullmatch(r"qa([1-9]|1\d|20)", name):
            problems.append(f"--tasks {name!r}: must be of qa1..qa20, such as qa1,qa2")
    return found


def _lengths(names: str, problems: list[str]) -> dict[str, int]:
    from lm.evaluation.babilong import parse_length

    found = {}
    for name in names.split(","):
        with noting(problems):
            found[name.strip()] = parse_length(name.strip())
    return dict(sorted(found.items(), key=lambda item: item[1]))
