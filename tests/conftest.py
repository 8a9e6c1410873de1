"""Shared by all tests: one thread for torch, and `needs(command)` for what a machine may lack."""

import os
import shutil

import pytest
import torch

torch.set_num_threads(1)
_not_run: set[str] = set()


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker in item.iter_markers("needs"):
        for command in marker.args:
            if shutil.which(command) is None:
                _not_run.add(f"{item.nodeid} (needs {command})")
                reason = f"{command} is not on PATH; deploy/apt-packages.txt names the package that brings it"
                (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)


def pytest_terminal_summary(terminalreporter) -> None:
    if _not_run:
        terminalreporter.section("NOT RUN: a program they need is missing")
        for line in sorted(_not_run):
            terminalreporter.line(line)
