"""The console script `pmi`: lm's commands, and later those of the service."""

import sys

from lm.cli import app
from lm.commands import run


def main() -> None:
    """Entry point of `pmi`."""
    sys.exit(run(app))
