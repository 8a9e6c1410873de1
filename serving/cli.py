"""The console script `pmi`: lm's commands and those of the service."""

import sys

from lm.cli import app
from lm.commands import run
from serving.engine.cli import mount as mount_engine
from serving.planning.cli import mount as mount_planning
from serving.serve_cli import mount as mount_serve
from serving.sessions.cli import app as sessions_app
from serving.tour import mount as mount_tour

mount_engine(app)
mount_serve(app)
mount_planning(app)
mount_tour(app)
app.add_typer(sessions_app, name="sessions")


def main() -> None:
    """Entry point of `pmi`."""
    sys.exit(run(app))


if __name__ == "__main__":
    main()
