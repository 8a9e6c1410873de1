"""Following a job: a progress bar (lines where there is no terminal), Prometheus metrics, and Ctrl-C that keeps the work."""

import time
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from lm.errors import UserError
from lm.evaluation.job import Job, Listener, Pass, Result, Runner, here
from lm.evaluation.stream import StoppedError
from lm.evaluation.tally import Outcome
from lm.model.checks import StateError
from lm.training.signals import StopRequest

LINE_EVERY = 15.0
"""Seconds between lines of progress where there is no terminal."""


class Metrics:
    """Prometheus metrics of this process, on a port: http://HOST:PORT/metrics."""

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

        registry = CollectorRegistry()
        self.tokens = Counter("pmi_eval_tokens", "tokens predicted", registry=registry)
        self.documents = Counter("pmi_eval_documents", "documents read to their end", registry=registry)
        self.failures = Counter("pmi_eval_failures", "workers lost", registry=registry)
        self.speed = Gauge("pmi_eval_tokens_per_second", "tokens predicted per second", registry=registry)
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except OSError as error:
            raise UserError(f"--metrics-port {port}: cannot be opened ({error}); choose a free port") from error

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()


def follow(job: Job, console: Console, metrics_port: int | None = None, runner: Runner = here) -> Result:
    """Run a job and show how far it is; a signal keeps what is done and ends with a word on how to go on."""
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    metrics = Metrics(metrics_port) if metrics_port is not None else None
    request = StopRequest()
    try:
        with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
            shown = _Shown(progress, console, metrics)
            listener = Listener(shown.started, shown.advanced, shown.document, shown.failed, lambda: bool(request.signal))
            return job.run(listener, runner)
    except StoppedError as stopped:
        console.print(_kept(job, len(stopped.open)), markup=False, soft_wrap=True)
        raise typer.Exit(128 + request.signal) from stopped
    except StateError as error:
        raise UserError(f"the model's results are not numbers any more ({error}); its weights may be damaged") from error
    finally:
        request.close()
        if metrics is not None:
            metrics.close()


def _kept(job: Job, middle: int) -> str:
    """What a run that was stopped leaves."""
    if job.options.out is None:
        return "stopped, nothing kept (no --out)"
    done = sum(len(job.journal.outcomes.get(part.name, {})) for part in job.passes)
    total = sum(len(part.items) for part in job.passes)
    share = f"{done:,} of {total:,} documents" + (f" of {len(job.passes)} passes" if len(job.passes) > 1 else "")
    begun = f", {middle} more in the middle" if middle else ""
    return f"stopped, kept in {job.options.out}: {share}{begun}; to go on, run the same command again"


class _Shown:
    def __init__(self, progress: Progress, console: Console, metrics: Metrics | None) -> None:
        self.progress, self.console, self.metrics = progress, console, metrics
        self.done = self.total = 0
        self.task: Any = None
        self.name = ""
        self.line = self.began = time.monotonic()
        self.before = 0

    def started(self, part: Pass, before: int) -> None:
        if self.task is not None:
            self.progress.update(self.task, completed=self.total)
        self.name, self.total, self.done, self.before = part.name, part.tokens, before, before
        self.line = self.began = time.monotonic()
        self.task = self.progress.add_task(f"memory {part.name}", total=part.tokens, completed=before)
        if before:
            self.console.print(f"memory {part.name}: {before:,} of {part.tokens:,} tokens were read before", markup=False)

    def advanced(self, tokens: int) -> None:
        self.done += tokens
        now = time.monotonic()
        speed = (self.done - self.before) / max(now - self.began, 1e-9)
        if self.metrics is not None:
            self.metrics.tokens.inc(max(0, tokens))  # a lost worker's tokens are read again
            self.metrics.speed.set(speed)
        self.progress.update(self.task, completed=self.done, description=f"memory {self.name}  {speed:,.0f} tokens/s")
        if not self.console.is_terminal and now - self.line > LINE_EVERY:
            self.line = now
            share = f"{self.done:,}/{self.total:,} tokens ({self.done / self.total:.0%})"
            self.console.print(f"memory {self.name}: {share}  {speed:,.0f} tokens/s", markup=False, soft_wrap=True)

    def failed(self) -> None:
        if self.metrics is not None:
            self.metrics.failures.inc()

    def document(self, part: Pass, outcome: Outcome) -> None:
        if self.metrics is not None:
            self.metrics.documents.inc()
