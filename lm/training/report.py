"""What a run tells while it runs: progress on the terminal, metrics.jsonl, TensorBoard, Prometheus. First rank only."""

import json
import math
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

METRICS = "metrics.jsonl"
SPEED_OVER = 50
"""Steps that the shown speed is an average of."""


class Report:
    """Where figures go. `step` is called for every step, `validation` for every evaluation."""

    def __init__(
        self, run: Path, console: Console, *, total: int, done: int, per_bit: bool, every: int, flops_per_token: float,
        processes: int, device: torch.device, port: int | None,
    ) -> None:  # fmt: skip
        self.console, self.total, self.per_bit, self.every = console, total, per_bit, every
        self.flops_per_token, self.peak = flops_per_token, processes * measured_peak(device)
        self._cut(run / METRICS, done)
        self._file = (run / METRICS).open("a", buffering=1)
        self._board = _board(run / "tensorboard", done)
        self._gauges = _Gauges(port) if port is not None else None
        self._times: deque[tuple[float, int]] = deque(maxlen=SPEED_OVER)
        self._times.append((time.perf_counter(), 0))
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), TimeElapsedColumn())
        self._progress = Progress(*columns, console=console, disable=not console.is_terminal)
        self._task = self._progress.add_task("training", total=total, completed=done)
        self._progress.start()

    @staticmethod
    def _cut(path: Path, done: int) -> None:
        """Drop what was measured behind the checkpoint that the run goes on from."""
        if not path.exists():
            return
        lines = path.read_text().splitlines(keepends=True)
        kept = [line for line in lines if line.endswith("\n") and json.loads(line)["step"] <= done]
        if len(kept) != len(lines):
            beside = path.with_suffix(".part")
            beside.write_text("".join(kept))
            os.replace(beside, path)

    def measure(self, loss: float) -> tuple[str, float]:
        """A loss in nats as what is usual for the tokenizer: bits per character of bytes, else perplexity."""
        return ("bpc", loss / math.log(2)) if self.per_bit else ("ppl", math.exp(min(loss, 700.0)))

    def step(self, step: int, figures: dict[str, Any]) -> None:
        """One step's figures: loss, tokens, learning_rate, gradient_norm, memory_norm, skipped."""
        self._times.append((time.perf_counter(), figures["tokens"]))
        span = self._times[-1][0] - self._times[0][0]
        speed = sum(tokens for _, tokens in list(self._times)[1:]) / max(span, 1e-9)
        left = (self.total - step) * span / max(1, len(self._times) - 1)
        unit, value = self.measure(math.nan if figures["loss"] is None else figures["loss"])
        utilisation = speed * self.flops_per_token / self.peak
        row = {"kind": "train", "step": step, **figures, unit: value, "tokens_per_second": speed, "utilisation": utilisation}
        self._file.write(json.dumps({key: _finite(entry) for key, entry in row.items()}) + "\n")
        norms = f"gradient {_short(figures['gradient_norm'])}  memory {_short(figures['memory_norm'])}"
        line = (
            f"loss {_short(figures['loss'])}  {unit} {value:.4g}  {speed:,.0f} tokens/s  lr {figures['learning_rate']:.2e}"
            f"  {norms}  {utilisation:.0%} of peak  {clock(left)} left"
        )
        self._progress.update(self._task, completed=step, description=line)
        if step % self.every and step != self.total:
            return
        if not self.console.is_terminal:
            self.console.print(f"step {step}/{self.total}  {line}", soft_wrap=True, highlight=False, markup=False)
        for name in ("loss", unit, "learning_rate", "gradient_norm", "memory_norm", "tokens_per_second", "utilisation"):
            number = row.get(name)
            if isinstance(number, float) and math.isfinite(number):
                self._board.add_scalar(f"train/{name}", number, step)
        if self._gauges:
            self._gauges.set({**row, "perplexity_or_bpc": value})

    def validation(self, step: int, loss: float, sample: str) -> None:
        """An evaluation's figures and sample of text."""
        unit, value = self.measure(loss)
        self._file.write(json.dumps({"kind": "validation", "step": step, "loss": loss, unit: value, "sample": sample}) + "\n")
        self._board.add_scalar("validation/loss", loss, step)
        self._board.add_scalar(f"validation/{unit}", value, step)
        if sample:
            self._board.add_text("sample", sample, step)
        self.say(f"step {step}: validation {unit} {value:.4f}")
        if sample:
            self.say(sample)
        if self._gauges:
            self._gauges.set({"validation_loss": loss})
        self._times.clear()  # the time spent here is no training time
        self._times.append((time.perf_counter(), 0))

    def say(self, message: str) -> None:
        """A message above the progress."""
        self._progress.console.print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End progress and files."""
        self._progress.stop()
        self._file.close()
        self._board.close()
        if self._gauges:
            self._gauges.close()


class _Gauges:
    """Prometheus metrics on a port of this machine: http://HOST:PORT/metrics."""

    NAMES = (
        "step", "loss", "perplexity_or_bpc", "learning_rate", "gradient_norm", "memory_norm", "tokens_per_second", "utilisation",
        "tokens_total", "skipped_total", "validation_loss",
    )  # fmt: skip

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, Gauge, start_http_server

        from lm.errors import UserError

        registry = CollectorRegistry()
        self._gauges = {name: Gauge(f"pmi_train_{name}", f"{name} of this run", registry=registry) for name in self.NAMES}
        try:
            self._server, self._thread = start_http_server(port, registry=registry)
        except OSError as error:
            raise UserError(f"--metrics-port {port}: cannot be opened ({error}); choose a free port") from error

    def set(self, row: dict[str, Any]) -> None:
        """Take over the figures that have a gauge."""
        for name, gauge in self._gauges.items():
            if row.get(name) is not None:
                gauge.set(float(row[name]))

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()


def measured_peak(device: torch.device) -> float:
    """Floating-point operations per second that this process reaches on a large product: the peak that use is measured by."""
    width = 512 if device.type == "cpu" else 4096  # a GPU needs more to be busy
    a = torch.ones(width, width, device=device)
    best = math.inf
    for _ in range(8):
        start = time.perf_counter()
        float((a @ a)[0, 0])  # waits for it
        best = min(best, time.perf_counter() - start)
    return 2 * width**3 / best


def clock(seconds: float) -> str:
    """Seconds as h:mm:ss."""
    whole = int(seconds)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def _short(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _board(folder: Path, done: int) -> Any:
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=done + 1 if done else None)
