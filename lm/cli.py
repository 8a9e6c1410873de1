"""The commands of `lm` (mounted by the console script `pmi`). Heavy imports stay inside commands, so that --help is quick."""

import sys
from typing import Any

import click
import typer
from rich.console import Console

from lm.data.cli import app as data_app
from lm.errors import UserError

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False)
app.add_typer(data_app, name="data")
stderr = Console(stderr=True, highlight=False)


def run(application: typer.Typer, args: list[str] | None = None) -> int:
    """Run a command line; every mistake of the user becomes a message and exit code 2, never a traceback."""
    command: Any = typer.main.get_command(application)
    try:
        result = command.main(args=args, prog_name="pmi", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except UserError as error:
        for problem in error.problems:
            stderr.print(f"error: {problem}", markup=False, soft_wrap=True)
        return 2
    except click.exceptions.Abort:
        stderr.print("interrupted")
        return 130
    except click.exceptions.Exit as exit_:
        return exit_.exit_code
    except click.ClickException as error:
        error.show()
        return 2


def main() -> None:
    """Entry point of `python -m lm`."""
    sys.exit(run(app))
