"""The command line: help that helps, mistakes answered with every problem at once, never a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from lm.commands import run
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


RUNS_NO_MODEL = {
    "data prepare", "data inspect", "model show", "export", "plot", "keys create", "keys ls", "keys rm", "babilong make",
    "sessions ls", "sessions fork", "sessions rollback", "sessions export", "sessions import", "sessions rm", "sessions verify",
    "sessions evict", "reason models", "reason report",
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
