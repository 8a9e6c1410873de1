"""The command line: help that helps, mistakes answered with every problem at once, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from lm.commands import run
from lm.config_files import configs_folder
from serving.cli import app


def pmi(*args: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "200", "TERM": "dumb"}
    return subprocess.run([sys.executable, "-m", "serving.cli", *args], capture_output=True, text=True, env=env, check=False)


def commands() -> list[list[str]]:
    found = []

    def walk(application: object, path: list[str]) -> None:
        for command in application.registered_commands:  # type: ignore[attr-defined]
            found.append([*path, command.name or command.callback.__name__.replace("_", "-")])
        for group in application.registered_groups:  # type: ignore[attr-defined]
            walk(group.typer_instance, [*path, group.name])

    walk(app, [])
    return found


def test_help_lists_every_command() -> None:
    result = pmi("--help")
    assert result.returncode == 0
    for path in commands():
        assert path[0] in result.stdout


@pytest.mark.parametrize("path", commands(), ids=" ".join)
def test_every_commands_help_shows_a_worked_example(path: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, [*path, "--help"]) == 0
    assert f"Example: pmi {' '.join(path)}" in " ".join(capsys.readouterr().out.split())


TRAIN = str(configs_folder() / "train" / "enwik8-small.yaml")
RUNS_NO_MODEL = {
    "data prepare", "data inspect", "model show", "export", "plot", "keys create", "keys ls", "keys rm", "babilong make",
    "sessions ls", "sessions fork", "sessions rollback", "sessions export", "sessions import", "sessions rm", "sessions verify",
    "sessions evict", "reason models", "reason report", "eval-compare",
}  # fmt: skip
"""Every other command, and every new one, must have --device."""


@pytest.mark.parametrize("path", [path for path in commands() if " ".join(path) not in RUNS_NO_MODEL], ids=" ".join)
def test_every_command_that_runs_a_model_has_device_and_refuses_one_that_is_not_there(
    path: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = typer.main.get_command(app)
    for name in path:
        command = command.commands[name]  # type: ignore[attr-defined]
    arguments = []
    for parameter in command.params:
        if parameter.required:  # 1 is a number, and the name of a folder that is not there
            arguments += [parameter.opts[0], "1"] if parameter.opts[0].startswith("-") else ["1"]
    if path == ["sessions", "show"]:  # its model is optional
        arguments += ["--checkpoint", "1"]
    assert run(app, [*path, *arguments, "--device", "warp"]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "--device 'warp': not a device of this machine, which has cpu" in error
    assert "give one of these, or auto" in error


def test_every_mistake_in_the_flags_is_named_at_once() -> None:
    result = pmi("certify", "--segments", "3", "--seed", "x", "--sped=1", "--colour")
    assert result.returncode == 2
    assert "Traceback" not in result.stderr
    for part in "CHECKPOINT", "--segments", "'3'", "--seed", "'x'", "--sped", "--colour", "pmi certify --help":
        assert part in result.stderr


@pytest.mark.parametrize(
    ("args", "messages"),
    [
        (["model", "show", "smalll"], ["'smalll'", "'small'"]),
        (
            ["model", "show", "tiny", "--set", "layers=x", "--set", "memory.top_k=0", "--set", "speed=3"],
            ["layers", "'x'", "top_k", "speed"],
        ),
        (
            ["model", "show", "tiny", "--set", "layers=x", "--set", "heads=7", "--set", "memory.correction=true"],
            ["layers", "'x'", "heads: 7 does not divide"],
        ),
        (["model", "show", "tiny", "--set", "heads=7"], ["7 does not divide width 64", "[1, 2, 4, 8, 16, 32, 64]"]),
        (["model", "show", "tiny", "--set", "memory.read=working", "--set", "memory.correction=true"], ["read: both"]),
        (["model", "show", "tiny", "--set", "memory.layers=[4]"], ["0..3"]),
        (["model", "show", "tiny", "--set", "nothing"], ["key.path=value"]),
        (["certify", "/nowhere"], ["/nowhere", "config.json"]),
        (["generate", "--checkpoint", "/nowhere"], ["/nowhere"]),
        (
            ["certify", "/nowhere", "--device", "gpu", "--dtype", "f8", "--json", "/no/x"],
            ["'gpu'", "cpu", "'f8'", "/no/x", "/nowhere"],
        ),
        (["model", "show", "tiny", "--set", "nothing", "--set", "also"], ["'nothing'", "'also'"]),
        (
            ["model", "show", "tiny", "--set", "heads=7", "--set", "cutoffs=[999]", "--set", "memory.layers=[9]"],
            ["7 does", "999", "[9]"],
        ),
        (["model", "show", "tiny", "--set", "width=10000000000000"], ["width", "65536"]),
        (["generate", "--checkpoint", "/nowhere", "--seed", "9" * 30, "--temperature", "inf"], ["--seed", "--temperature"]),
        (["generate", "--checkpoint", "/nowhere", "--prompt", "\udcff"], ["UTF-8", "/nowhere"]),
        (
            ["model", "show", "tiny", "--set", "memory.alpha=abc", "--set", "memory.layers=[9]", "--set", "memory.heads=7"],
            ["memory.alpha: must be a number", "'abc'", "memory.layers: [9] must name layers 0..3", "memory.heads: 7 does not"],
        ),
        (
            [
                "certify",
                "/nowhere",
                "more",
                "--dtype",
                "f16",
                "--segments",
                "4",
                "--seed",
                "-1",
                "--device",
                "gpu",
                "--json",
                ".",
            ],
            ["/nowhere", "'more'", "'f16'", "--segments", "--seed", "'gpu'", "--json .: is a folder"],
        ),
        (
            ["train", "--config", TRAIN, "--out", "x", "--set", "training.steps=0", "--set", "model.layers=0", "--set", "foo"],
            ["training.steps: must be 1 or more", "layers: must be 1 or more", "'foo'"],
        ),
        (
            ["train", "--config", "nope.yaml", "--out", "x", "--set", "foo", "--set", "model.bar"],
            ["nope.yaml", "'foo'", "'bar'"],
        ),
        (["model", "show", "nope", "--set", "foo"], ["'nope'", "'tiny'", "'foo'"]),
        (["eval", "--checkpoint", "/nope", "--data", "/nada"], ["/nope", "--data /nada: there is no such"]),
        (
            ["model", "show", "tiny", "--set", "memory=on", "--set", "layers.x=3"],
            ["memory: must be off, or a mapping of its keys", "(got True)", "layers: must be a whole number", "{'x': 3}"],
        ),
        (
            ["model", "show", "tiny", "--set", "embedding_std=.inf", "--set", "rotary_base=.nan", "--set", "layers=true"],
            ["embedding_std: must be a finite number", "rotary_base: must be a finite", "layers: must be a number", "True"],
        ),
        (["model", "show", "tiny", "--set", "cutoffs=[true]"], ["cutoffs: must be a number"]),
        (["model", "show", "tiny", "--set", "memory.alpha=0"], ["memory.alpha: must be more than 0", "raise it"]),
        (["model", "show", "tiny", "--set", "memory.alpha=1"], ["memory.alpha: must be less than 1", "lower it"]),
        (["model", "show", "tiny", "--set", "segment=1"], ["set segment to 2 or more, or memory: off"]),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, list) else None,
)
def test_a_mistake_is_answered_with_value_and_allowed_values(
    args: list[str], messages: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(app, args) == 2
    error = capsys.readouterr().err
    for message in messages:
        assert message in error


def test_a_value_that_is_none_of_several_kinds_gets_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["model", "show", "tiny", "--set", "memory.layers=abc"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: tiny: memory.layers: must be 'all' or a list of whole numbers such as [0, 2]; choose one of these (got 'abc')"
    ]


def test_a_segment_of_one_token_is_fine_where_nothing_is_chosen_from_it(capsys: pytest.CaptureFixture[str]) -> None:
    for change in ["memory=off"], ["memory.read=long_term"]:
        options = [x for item in ("segment=1", *change) for x in ("--set", item)]
        assert run(app, ["model", "show", "tiny", *options]) == 0


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("layers: 2020-01-01", ["layers: datetime.date(2020, 1, 1)", "text, numbers, true, false, null, lists and mappings"]),
        ("2020-01-01: 3", ["key datetime.date(2020, 1, 1)", "put it in quotes"]),
        ("layers: !!set {a, b}\nwidth: !!binary aGVsbG8=", ["layers: {'a', 'b'}", "width: b'hello'"]),
        ("layers: &a [*a]", ["layers: 0: holds itself"]),
        ("layers: " + "[" * 3000, ["nested too deeply", "at most 32 levels"]),
        ("layers: " + "[" * 100 + "]" * 100, ["nested too deeply", "at most 32 levels"]),
        ("layers: 2020-99-99", ["cannot be read as a configuration", "month"]),
        ("layers: !!bool maybe", ["cannot be read as a configuration", "maybe"]),
        ("layers: \x00", ["cannot be read as a configuration"]),
    ],
    ids=lambda x: x[:30] if isinstance(x, str) else "",
)
def test_what_no_configuration_can_hold_is_named_with_its_place(
    text: str, messages: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.yaml").write_text(text)
    assert run(app, ["model", "show", str(tmp_path / "model.yaml")]) == 2
    error = capsys.readouterr().err
    for message in ["model.yaml", *messages]:
        assert message in error
    key, _, value = text.partition(": ")
    if key == "layers" and "\n" not in value and "\x00" not in value:
        assert run(app, ["model", "show", "tiny", "--set", f"layers={value}", "--set", "also"]) == 2
        error = capsys.readouterr().err
        assert "--set" in error
        assert "layers" in error
        assert "'also'" in error
        assert len(error) < 1000


def test_deep_json_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model.json").write_text('{"layers": ' + "[" * 100_000 + "]" * 100_000 + "}")
    assert run(app, ["model", "show", str(tmp_path / "model.json")]) == 2
    assert "model.json: nested too deeply" in capsys.readouterr().err


def test_the_papers_note_is_shown_of_the_preset_as_it_is_by_whatever_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["model", "show", str(configs_folder() / "model" / "enwik8.yaml")]) == 0
    assert "45M" in capsys.readouterr().out
    assert run(app, ["model", "show", "enwik8", "--set", "layers=1", "--set", "memory=off"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "45M" not in out
    assert "changed from the preset in layers, memory: the paper's figures for enwik8 are not this model's" in out


def test_model_show_prints_the_papers_figure_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["model", "show", "enwik8"]) == 0
    out = capsys.readouterr().out
    assert "45M" in out
    assert "98,304" in out  # memory bytes
    assert "25,165,824" in out  # window bytes


def test_the_demo_trains_saves_and_generates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(app, ["demo", "--out", str(tmp_path), "--steps", "2"]) == 0
    assert "bits per byte" in capsys.readouterr().out
    assert run(app, ["generate", "--checkpoint", str(tmp_path / "model"), "--prompt", "Ahab", "--tokens", "5"]) == 0
    assert capsys.readouterr().out.startswith("Ahab")


def test_a_reader_that_goes_away_and_a_file_that_cannot_be_written_give_no_traceback(tmp_path: Path) -> None:
    assert run(app, ["demo", "--out", str(tmp_path), "--steps", "1"]) == 0
    command = [sys.executable, "-m", "serving.cli", "generate", "--checkpoint", str(tmp_path / "model"), "--tokens", "3000"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.read(20)
        process.stdout.close()
        assert process.stderr is not None
        assert b"Traceback" not in process.stderr.read()
        process.wait(60)
    result = pmi("certify", str(tmp_path / "model"), "--segments", "8", "--json", str(tmp_path / "no" / "where.json"))
    assert result.returncode == 2
    assert "where.json" in result.stderr
    assert "Traceback" not in result.stderr


def test_certify_refuses_a_folder_for_json_before_it_proves_anything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lm.model import certificate

    assert run(app, ["demo", "--out", str(tmp_path), "--steps", "1"]) == 0
    monkeypatch.setattr(certificate, "certify", lambda *_: pytest.fail("the proofs ran"))
    assert run(app, ["certify", str(tmp_path / "model"), "--json", str(tmp_path)]) == 2
    assert "is a folder; name a file in it" in capsys.readouterr().err
