"""The commands `pmi reason run`, `report` and `look`: the paper's question answering, triangles and pictures."""

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from lm.commands import Commands, Device, stderr, stdout
from lm.errors import UserError, collecting, noting

app = Commands(help="Reasoning with the memory: bAbI, Sort-of-CLEVR, triangles, CIFAR-10, with the paper's comparisons.")

Data = Annotated[Path | None, typer.Option(help="Of babi and cifar: the archive or folder to read.")]
Cache = Annotated[Path | None, typer.Option(help="Where data sets are kept. Default: the user's cache folder, pmi/reason.")]

LONGEST_MODEL = 22
"""Characters of a model's name: what names rows so shortly is not broken over lines."""


def mount(commands: Commands) -> None:
    """Add the commands to `commands`."""
    commands.add_typer(app, name="reason")
    commands.command(epilog="Example: pmi explain --checkpoint runs/x/model --text book.txt --at 2000 --out explained")(explain)


@app.command(
    epilog="Example: pmi reason run babi --model pmi-tr-m,tr --runs 3 --tasks 1,2,6,15,20 --data babi.tar.gz --out runs/reason"
)
def run(
    task: Annotated[str, typer.Argument(help="babi, clevr, triangles or cifar.")],
    model: Annotated[str, typer.Option(help="One or more of configs/reason/models.yaml, such as pmi-tr-m,tr.")] = "pmi-tr",
    runs: Annotated[int, typer.Option(help="Runs of each model; their seeds are 1, 2, ...", min=1, max=1000)] = 1,
    out: Annotated[Path, typer.Option(help="Runs go to OUT/TASK/MODEL/run-N; run again to go on.")] = Path("runs/reason"),
    preset: Annotated[str, typer.Option(help="cpu: minutes. paper: the paper's sizes and budget.")] = "cpu",
    tasks: Annotated[str | None, typer.Option(help="Of babi: only these tasks, such as 1,2,6.")] = None,
    data: Data = None,
    set_: Annotated[
        list[str],
        typer.Option("--set", metavar="KEY=VALUE", help="Change a key, such as training.steps=500 or encoder.layers=4."),
    ] = [],  # noqa: B006
    plot: Annotated[bool, typer.Option("--plot", help="Also draw samples of the data to OUT/TASK/samples.png.")] = False,
    cache: Cache = None,
    device: Device = "auto",
) -> None:
    """Train models on a task and measure them, with the paper's figures beside ours.

    Interrupted, the same command goes on and ends with the same weights.
    """
    from lm import machine
    from lm.model.pretrained import resolve_device
    from lm.reasoning import pictures, report
    from lm.reasoning.build import load_data
    from lm.reasoning.config import load_reason_config
    from lm.reasoning.tasks.dataset import cache_folder
    from lm.reasoning.training import RESULT, Run, alone

    changes, configs = list(set_), []
    with collecting() as problems:
        with noting(problems):
            target = resolve_device(device)
        if tasks is not None:
            if task != "babi":
                problems.append(f"--tasks {tasks}: only babi has several; leave it out")
            elif not re.fullmatch(r"\s*\d+\s*(,\s*\d+\s*)*", tasks):
                problems.append(f"--tasks {tasks!r}: must be numbers of tasks, 1 to 20, with commas between them, such as 1,2,6")
            else:
                changes.append(f"data.tasks=[{tasks}]")
        names = list(dict.fromkeys(name.strip() for name in model.split(",")))
        for name in names:
            with noting(problems):
                configs.append(load_reason_config(task, name, preset, changes))
    machine.keep_pages()
    with stderr.status(f"{task}: data"):
        dataset = load_data(configs[0], data, cache or cache_folder())
    for note in dataset.notes:
        stderr.print(f"note: {note}", markup=False, soft_wrap=True)
    folder = out / task
    if plot:
        folder.mkdir(parents=True, exist_ok=True)
        pictures.samples(dataset, folder / "samples.png")
        stdout.print(f"wrote {folder / 'samples.png'}", markup=False, highlight=False)
    for number in range(1, runs + 1):
        for config in configs:
            place = folder / config.model / f"run-{number}"
            with alone(place):
                training = Run(config, dataset, number, place, target)
                if (place / RESULT).is_file():
                    continue
                if not training.train(stderr, f"{task} {config.model} run {number}"):
                    said = f"stopped behind step {training.step}, saved. To go on, run the same command again"
                    stderr.print(said, soft_wrap=True)
                    raise typer.Exit(130)
                training.finish()
    outcomes = [
        found for name in names for found in report.collect(folder / name) if found.seed <= runs and found.preset == preset
    ]
    _show(report.summary(outcomes))
    stdout.print(f"{folder}: a folder for each run; `pmi reason report {out}` draws the curves", highlight=False, soft_wrap=True)


@app.command(epilog="Example: pmi reason models --preset paper")
def models(preset: Annotated[str, typer.Option(help="cpu or paper.")] = "paper") -> None:
    """Parameters of every model on every task, beside the paper's."""
    from lm.reasoning import paper, report
    from lm.reasoning.config import PRESETS

    if preset not in PRESETS:
        raise UserError(f"--preset {preset!r}: must be one of {', '.join(PRESETS)}")
    _show([report.sizes(preset)])
    stdout.print(paper.WHY_PARAMETERS, highlight=False)


@app.command("report", epilog="Example: pmi reason report runs/reason --out runs/reason")
def report_(
    source: Annotated[Path, typer.Argument(help="The --out of `pmi reason run`, or a report.json.")],
    out: Annotated[Path | None, typer.Option(help="Where report.md, report.json and TASK.png go. Default: there.")] = None,
) -> None:
    """Collect all finished runs into tables and curves."""
    from lm.reasoning import pictures, report
    from lm.reasoning.tasks.dataset import write_json

    outcomes = report.collect(source)
    for run in report.unfinished(source):
        stderr.print(f"note: {run} is not finished and left out", markup=False, soft_wrap=True)
    folder = out or (source if source.is_dir() else source.parent)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.md").write_text(report.markdown(outcomes))
    if source != folder / report.REPORT:
        write_json(folder / report.REPORT, report.as_json(outcomes))
    drawn: list[str] = []
    for runs in report.comparable(outcomes):
        task, already = runs[0].task, sum(name.startswith(runs[0].task) for name in drawn)
        name = f"{task}-{already + 1}.png" if already else f"{task}.png"
        if pictures.curves(runs, folder / name):
            drawn.append(name)
    _show(report.summary(outcomes))
    written = ", ".join(["report.md", report.REPORT, *drawn])
    stdout.print(f"wrote {folder}: {written}", markup=False, highlight=False, soft_wrap=True)


@app.command(epilog="Example: pmi reason look runs/reason/babi/pmi-tr-m/run-1 --data babi.tar.gz --samples 4")
def look(
    run: Annotated[Path, typer.Argument(help="The folder of a run, such as runs/reason/babi/pmi-tr-m/run-1.")],
    out: Annotated[Path | None, typer.Option(help="Where the PNGs and attention.json go. Default: the run's folder.")] = None,
    samples: Annotated[int, typer.Option(help="Test samples to look at.", min=1, max=50)] = 4,
    data: Data = None,
    cache: Cache = None,
    device: Device = "auto",
) -> None:
    """Draw what the inputs attend to in working and long-term memory, layer by layer."""
    from lm.config_files import validate
    from lm.model.pretrained import resolve_device
    from lm.reasoning import pictures
    from lm.reasoning.build import load_data
    from lm.reasoning.config import ReasonConfig
    from lm.reasoning.tasks.dataset import cache_folder, write_json
    from lm.reasoning.training import REQUEST, STATE, load_model, read_request

    with collecting() as problems:
        if not (run / REQUEST).is_file() or not (run / STATE).is_file():
            problems.append(f"{run}: is not the folder of a run ({REQUEST} and {STATE}); give OUT/TASK/MODEL/run-N")
        with noting(problems):
            target = resolve_device(device)
    request = read_request(run)
    config = validate(ReasonConfig, request["config"], str(run / REQUEST))
    if config.encoder.memory is None:
        raise UserError(f"{run}: model {config.model} has no memory to look into; give a run of a pmi-tr model")
    dataset = load_data(config, data, cache or cache_folder())
    if request.get("data_fingerprint", dataset.fingerprint) != dataset.fingerprint:
        raise UserError(f"{run}: was trained on other data than these; give the --data that it was trained on")
    model = load_model(run, dataset, config).to(target)
    rows, folder = pictures.chosen(dataset, samples), out or run
    folder.mkdir(parents=True, exist_ok=True)
    found: list[dict[str, Any]] = []
    for level in ("working", "long_term"):
        drawn = pictures.attention(model, dataset, rows, level, folder / f"attention_{level}.png")
        found += drawn
        if drawn:
            stdout.print(f"wrote {folder / f'attention_{level}.png'}", markup=False, highlight=False, soft_wrap=True)
    write_json(folder / "attention.json", found)


def explain(
    checkpoint: Annotated[Path, typer.Option(help="The folder of a language model.")],
    text: Annotated[Path, typer.Option(help="A text file.")],
    at: Annotated[int | None, typer.Option(help="Which token's prediction, from 0. Default: the text's last.", min=0)] = None,
    out: Annotated[Path, typer.Option(help="Where explain.png and explain.json go.")] = Path("explained"),
    segments: Annotated[int, typer.Option(help="How many segments back words are traced.", min=1)] = 64,
    device: Device = "auto",
) -> None:
    """Which words of a text the memories' answers go back to when a token is predicted."""
    from lm.model.pretrained import from_pretrained, resolve_device
    from lm.reasoning import explaining

    with collecting() as problems:
        with noting(problems):
            target = resolve_device(device)
        with noting(problems):
            loaded = from_pretrained(checkpoint)
        if not text.is_file():
            problems.append(f"--text {text}: there is no such file")
    loaded.model.to(target)
    found = explaining.explain(loaded.model, loaded.tokenizer, text.read_text(errors="replace"), at, segments)
    out.mkdir(parents=True, exist_ok=True)
    explaining.write(found, out)
    for level, words in found["top"].items():
        table = Table("share", "word", "tokens back", title=f"what {level.replace('_', '-')} memory's answer goes back to")
        for word in words[:10]:
            table.add_row(f"{word['share']:.3f}", repr(word["text"]), str(word["back"]))
        stdout.print(table)
    stdout.print(f"wrote {out}: explain.png, explain.json", markup=False, highlight=False, soft_wrap=True)


def _show(sheets: list[Any]) -> None:
    """Tables that say everything in 80 columns, too: no name is cut, and a column without any value is left out."""
    for sheet in sheets:
        table = Table(title=sheet.title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
        shown = [i for i in range(len(sheet.header)) if any(row[i] for row in sheet.rows)]
        whole = max(len(row[0]) for row in sheet.rows) <= LONGEST_MODEL
        for i in shown:
            table.add_column(sheet.header[i], no_wrap=i == 0 and whole, overflow="fold")
        for row in sheet.rows:
            table.add_row(*(row[i] for i in shown))
        stdout.print(table)
