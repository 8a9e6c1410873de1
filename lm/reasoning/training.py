"""Training one model on one task, once: resumable, deterministic by seed.

OUT/request.json        the whole configuration, the seed and which data; the same command goes on with the run
OUT/state.safetensors   weights, optimiser and step: one file, replaced as a whole
OUT/metrics.jsonl       a line per evaluation of the validation set
OUT/result.json         the test set, when training is over
OUT/lock                held while a process trains there

Everything random in a step is drawn from (seed, step), so a run that was killed and went on ends with the same bits.
"""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from lm.config import OptimiserConfig
from lm.errors import UserError
from lm.evaluation.tasks_report import progress
from lm.reasoning.build import build
from lm.reasoning.config import ReasonConfig, ReasonTraining
from lm.reasoning.encoder import Reasoner
from lm.reasoning.tasks.dataset import Array, Dataset, evaluation_batches, order, write_json
from lm.training.loop import learning_rate
from lm.training.signals import StopRequest

REQUEST, STATE, METRICS, RESULT, LOCK = "request.json", "state.safetensors", "metrics.jsonl", "result.json", "lock"
SAVE_EVERY = 20.0
"""Seconds between saves."""
EVALUATION_BATCH = 256


@contextmanager
def alone(out: Path) -> Iterator[None]:
    """The folder of a run, for one process at a time; UserError where another has it."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / LOCK).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{out}: another process is training there; wait for it to end, or choose another --out") from error
        yield


class Run:
    """One seed of one model on one task, in its folder."""

    def __init__(self, config: ReasonConfig, dataset: Dataset, seed: int, out: Path, device: torch.device) -> None:
        self.config, self.dataset, self.seed, self.out, self.device = config, dataset, seed, out, device
        training, samples = config.training, len(dataset.splits["train"])
        self.model = build(config, dataset, seed).to(device)
        if training.batch > samples:
            raise UserError(f"training.batch: {training.batch:,} is more than the training set's {samples:,} samples; lower it")
        self.per_epoch = samples // training.batch
        self.steps = training.steps or self.per_epoch * (training.epochs or 1)
        self._claim()
        self.optimiser = optimiser_for(self.model, training)
        self.step, self.seconds = 0, 0.0
        self._epoch: tuple[int, list[Array]] = (-1, [])
        self._restore()

    def train(self, console: Console, label: str) -> bool:
        """Train to the end; false where a signal ended it before (what was done is kept)."""
        training, stop = self.config.training, StopRequest()
        marks = {round(self.steps * (i + 1) / training.evaluations) for i in range(training.evaluations)}
        optimisation = OptimiserConfig(lr=training.lr, warmup=training.warmup)
        began, before = time.monotonic(), self.seconds
        saved = began
        self.model.train()
        try:
            with progress(console, label, self.steps, "steps", self.step) as advance:
                while self.step < self.steps and not stop.signal:
                    cosine = training.schedule == "cosine" or self.step < training.warmup
                    rate = learning_rate(optimisation, self.step, self.steps) if cosine else training.lr
                    loss = self._train_step(rate)
                    self.step += 1
                    self.seconds = before + time.monotonic() - began
                    if self.step in marks:
                        accuracies = self._measure(loss)
                        saved = 0.0
                        advance(0, f"loss {loss:.3f}  validation {np.mean(accuracies):.3f}")
                    advance(1, f"loss {loss:.3f}")
                    if time.monotonic() - saved > SAVE_EVERY:
                        self._save()
                        saved = time.monotonic()
                self._save()
        finally:
            stop.close()
        return not stop.signal

    def finish(self) -> dict[str, Any]:
        """Measure on the test set and write the result."""
        right, count = accuracy(self.model, self.dataset, "test", None)
        result = {
            "task": self.config.task, "model": self.config.model, "preset": self.config.preset, "seed": self.seed,
            "parameters": parameters(self.model), "steps": self.steps, "batch": self.config.training.batch,
            "seconds": round(self.seconds, 1), "groups": self.dataset.groups, "right": right.tolist(), "count": count.tolist(),
            "accuracy": (right / count).tolist(), "guess": self.dataset.guess("test").tolist(), "notes": self.dataset.notes,
            "config": self.config.model_dump(mode="json"),
        }  # fmt: skip
        write_json(self.out / RESULT, result)
        return result

    def _train_step(self, rate: float) -> float:
        epoch, within = divmod(self.step, self.per_epoch)
        if self._epoch[0] != epoch:
            drawn = self.config.training
            batches = order(self.dataset, drawn.batch, drawn.pool, self.seed, epoch, drawn.together)
            self._epoch = (epoch, batches)
        torch.manual_seed((self.seed << 32) + self.step)  # dropout
        inputs, answers = self.dataset.batch("train", self._epoch[1][within], self.device)
        loss = F.cross_entropy(self.model(inputs), answers)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.training.clip)
        if not bool(norm.isfinite()):
            lower = f"take a lower training.lr than {self.config.training.lr:g}, and another --out"
            raise UserError(f"{self.out}, step {self.step}: the gradient is not finite; {lower}")
        for group in self.optimiser.param_groups:
            group["lr"] = rate
        self.optimiser.step()
        return float(loss.detach())

    def _measure(self, loss: float) -> Array:
        """Accuracy on the validation set, noted."""
        right, count = accuracy(self.model, self.dataset, "valid", self.config.training.evaluated)
        accuracies = right / np.maximum(1, count)
        row = {"step": self.step, "loss": loss, "accuracy": accuracies.tolist(), "seconds": round(self.seconds, 2)}
        with (self.out / METRICS).open("a") as file:
            file.write(json.dumps(row) + "\n")
        return accuracies

    # --- files -------------------------------------------------------------------------------------------------

    def _claim(self) -> None:
        """Make the folder this run's; UserError where it is another's."""
        request = {
            "seed": self.seed, "answers": len(self.dataset.answers), "data_fingerprint": self.dataset.fingerprint,
            "config": self.config.model_dump(mode="json"),
        }  # fmt: skip
        path = self.out / REQUEST
        if (self.out / STATE).is_file() or (self.out / RESULT).is_file():  # before that there is nothing to lose
            had = {"data_fingerprint": self.dataset.fingerprint, **read_request(self.out)}  # earlier runs do not name their data
            if had != request:
                other = [f"{key} {a!r}, now {b!r}" for key, a, b in differences(had, request)]
                raise UserError(f"{self.out}: is of a run with {'; '.join(other)}. Choose another --out, or the same settings")
            return
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(path, request)

    def _save(self) -> None:
        tensors = {f"model.{name}": value for name, value in self.model.state_dict().items()}
        for name, parameter in self.model.named_parameters():
            for key, value in self.optimiser.state[parameter].items():
                tensors[f"optimiser.{key}.{name}"] = value
        part = self.out / f".{STATE}.part"
        save_file({name: value.contiguous() for name, value in tensors.items()}, part,
                  {"step": str(self.step), "seconds": str(self.seconds)})  # fmt: skip
        os.replace(part, self.out / STATE)

    def _restore(self) -> None:
        path = self.out / STATE
        if not path.is_file():
            (self.out / METRICS).unlink(missing_ok=True)
            return
        tensors, metadata = read_state(path)
        fill(self.model, tensors, path)
        self.step, self.seconds = int(metadata["step"]), float(metadata["seconds"])
        for key in ("step", "exp_avg", "exp_avg_sq"):
            values = _under(tensors, f"optimiser.{key}.")
            for name, parameter in self.model.named_parameters():
                if name in values:
                    self.optimiser.state[parameter][key] = values[name].to(self.device if key != "step" else "cpu")
        kept = [row for row in read_metrics(self.out) if row["step"] <= self.step]  # what is behind the save is measured again
        (self.out / METRICS).write_text("".join(f"{json.dumps(row)}\n" for row in kept))


def read_request(run: Path) -> dict[str, Any]:
    """What a run's folder was asked for."""
    path = run / REQUEST
    try:
        request = json.loads(path.read_bytes())
        if not isinstance(request["config"], dict):
            raise TypeError("config is no mapping")
    except (ValueError, TypeError, KeyError, FileNotFoundError) as error:
        raise UserError(f"{path}: missing or damaged ({error!r}); restore it, or remove {run} to begin this run again") from error
    return dict(request)


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """The points of a run's curve. Behind the last newline there is nothing, or half a line of a run that was killed."""
    path = run / METRICS
    rows = []
    lines = path.read_bytes().split(b"\n")[:-1] if path.is_file() else []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            rows.append({**row, "step": int(row["step"]), "accuracy": [float(share) for share in row["accuracy"]]})
        except (ValueError, TypeError, KeyError) as error:
            raise UserError(f"{path}, line {number}: damaged ({error!r}); take the line out (the curve loses a point)") from error
    return rows


def read_state(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the notes (step, seconds) of a run's state."""
    try:
        with safe_open(path, "pt") as file:
            notes = file.metadata() or {}
            if missing := {"step", "seconds"} - notes.keys():
                raise SafetensorError(f"it does not say {' and '.join(sorted(missing))}")
            return {name: file.get_tensor(name) for name in file.keys()}, notes  # noqa: SIM118 (not a mapping)
    except SafetensorError as error:
        raise UserError(f"{path}: cannot be read ({error}); remove it to begin this run again") from error


def fill(model: Reasoner, tensors: dict[str, Tensor], path: Path) -> None:
    """The weights of a state; UserError where they are not this model's."""
    try:
        model.load_state_dict(_under(tensors, "model."))
    except RuntimeError as error:
        other = "its weights are not those of this model on these data; give the --data of the run"
        raise UserError(f"{path}: {other}, or remove the file to begin the run again") from error


def load_model(run: Path, dataset: Dataset, config: ReasonConfig) -> Reasoner:
    """The trained model in a run's folder."""
    model = build(config, dataset, 0)
    fill(model, read_state(run / STATE)[0], run / STATE)
    return model.eval()


@torch.inference_mode()
def accuracy(model: Reasoner, dataset: Dataset, split: str, most: int | None) -> tuple[Array, Array]:
    """Right answers and questions of each group of a split (of at most `most`, always the same)."""
    device, training = next(model.parameters()).device, model.training
    model.eval()
    right, count = np.zeros(len(dataset.groups), dtype=np.int64), np.zeros(len(dataset.groups), dtype=np.int64)
    for rows in evaluation_batches(dataset, split, most, EVALUATION_BATCH):
        inputs, answers = dataset.batch(split, rows, device)
        found = (model(inputs).argmax(-1) == answers).cpu().numpy()
        groups = dataset.splits[split].groups[rows]
        right += np.bincount(groups, found, len(right)).astype(np.int64)
        count += np.bincount(groups, minlength=len(count))
    model.train(training)
    return right, count


def optimiser_for(model: nn.Module, config: ReasonTraining) -> torch.optim.AdamW:
    """AdamW with weight decay on matrices only; without any it is Adam."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.lr, fused=True)


def parameters(model: nn.Module) -> int:
    """How many there are."""
    return sum(p.numel() for p in model.parameters())


def differences(a: Any, b: Any, place: str = "") -> list[tuple[str, Any, Any]]:
    """Where two nested mappings differ: (key.path, one, other)."""
    if isinstance(a, dict) and isinstance(b, dict):
        keys = dict.fromkeys([*a, *b])
        return [found for key in keys for found in differences(a.get(key), b.get(key), f"{place}.{key}" if place else key)]
    return [] if a == b or (a != a and b != b) else [(place, a, b)]


def _under(tensors: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
