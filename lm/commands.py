"""How all commands behave: every mistake in the flags is reported at once, and no mistake of the user gives a traceback."""

import io
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from typer.core import TyperCommand

from lm.errors import UserError, noting

Function = TypeVar("Function", bound=Callable[..., Any])
Device = Annotated[
    str, typer.Option("--device", help="Where the model runs: auto, cpu, cuda or cuda:N (GPUs are untested so far).")
]
"""The flag of every command that runs a model; `lm.model.pretrained.resolve_device` reads it."""
Set = Annotated[
    list[str],
    typer.Option("--set", metavar="KEY=VALUE", help="Change a key of the model, such as memory.layers=[1]; may be repeated."),
]
"""Changes to a model's configuration, read by `lm.config.load_model_config`."""
Seed = Annotated[int, typer.Option(help="Seed of everything random.", min=0, max=2**63 - 1)]
"""Any number that torch's generator takes."""
stdout = Console()
stderr = Console(stderr=True, highlight=False)
# typer brings its own copy of click in some versions; this is the base of its errors about flags in any
UsageError: type[Exception] = typer.BadParameter.__bases__[0]


class CheckedCommand(TyperCommand):
    """A command that looks at all its flags before it complains of any."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse; UserError with every problem found."""
        help_ = f"see `{ctx.command_path} --help`"
        problems: list[str] = []
        left = list(args)
        stray: list[str] = []  # what stands behind an unknown flag may be its value
        while True:
            try:
                values, rest, _ = self.make_parser(ctx).parse_args(args=list(left))
                break
            except UsageError as error:  # an unknown flag, or one without its value: look at the others without it
                problems.append(f"{_message(error)}; {help_}")
                wrong = getattr(error, "option_name", None)
                stray += [after for arg, after in pairwise(left) if arg == wrong]
                kept = [arg for arg in left if arg.split("=")[0] != wrong]
                if len(kept) == len(left):
                    raise UserError(problems) from error
                left = kept
        for parameter in self.get_params(ctx):
            try:
                _, rest = parameter.handle_parse_result(ctx, values, rest)
            except UserError as error:  # of an option's own check
                problems.extend(error.problems)
            except UsageError as error:
                given = values.get(str(parameter.name))
                got = "" if given is None else f" (got {given!r})"
                name = parameter.opts[0] if parameter.opts[0].startswith("-") else str(parameter.name).upper()
                problems.append(f"{name}: {_message(error)}{got}; {help_}")
        if unexpected := [arg for arg in rest if arg not in stray]:
            problems.append(f"unexpected arguments {' '.join(unexpected)!r}; {help_}")
        if problems:
            _also_the_device(values.get("device"), problems)
            raise UserError(problems)
        return super().parse_args(ctx, args)


class Commands(typer.Typer):
    """A group of checked commands."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False, **settings
        )

    def command(self, *args: Any, **settings: Any) -> Callable[[Function], Function]:
        """Register a command."""
        return super().command(*args, **{"cls": CheckedCommand, **settings})


def run(application: typer.Typer, args: list[str] | None = None) -> int:
    """Run a command line; every mistake of the user becomes a message and exit code 2, never a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that cannot show a character is no reason to stop
    try:
        application(args=args, prog_name="pmi")
    except UserError as error:
        for problem in error.problems:
            stderr.print(f"error: {problem}", markup=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        stderr.print("interrupted")
        return 130
    except OSError as error:
        stderr.print(
            f"error: {error.filename or 'files'}: {error.strerror or error}; nothing more was done", markup=False, soft_wrap=True
        )
        return 2
    except SystemExit as exit_:  # how typer ends
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    return 0


def _also_the_device(name: str | None, problems: list[str]) -> None:
    """Commands look at --device themselves, together with what they load; where they are not reached, it is looked at here."""
    if name is not None:
        from lm.model.pretrained import resolve_device

        with noting(problems):
            resolve_device(name)


def _message(error: Exception) -> str:
    return str(getattr(error, "message", error)).rstrip(".") or "is required, but was not given"
