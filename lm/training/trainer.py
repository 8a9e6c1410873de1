"""A training run: steps over carried memory, validation, checkpoints, resuming. One process or many, any backend.

One step reads K segments of every lane. Its loss is the sum over all real tokens of all processes and micro-batches, divided by
their number: the same at any split. State is carried per lane and cut off from the graph at the step's start.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from lm import machine
from lm.config import ModelConfig, RunConfig, load_model_config, with_defaults
from lm.data.files import write_atomically
from lm.data.lanes import Batch, Lanes, merge_states
from lm.data.prepared import Prepared, open_prepared
from lm.errors import UserError, collecting, noting
from lm.model import PMI, State
from lm.model.pretrained import from_pretrained
from lm.model.state import tensors
from lm.training import checkpoint, measure
from lm.training.backends import build, split_lanes
from lm.training.loop import learning_rate
from lm.training.objective import Objective, blank_state, flops_per_token
from lm.training.report import Report
from lm.training.signals import SIGNALS, StopRequest
from lm.training.world import World

RUN_FILE = "run.json"


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    step: int
    signal: int
    """The signal that ended it, 0 at its own end."""


class Trainer:
    """Everything a run consists of; `run()` goes to its end or to a signal."""

    def __init__(
        self, config: RunConfig, out: Path, world: World, console: Console, *, resume: bool = False,
        init_from: Path | None = None, metrics_port: int | None = None,
    ) -> None:  # fmt: skip
        machine.keep_pages()
        self.config, self.out, self.world = config, out, world
        with collecting() as problems:
            with noting(problems):
                self.micro, self.accumulation = split_lanes(config.training.lanes, config.training.micro_batch, world.size)
            data = None
            with noting(problems):
                data = self.data = open_prepared(config.data)
            with noting(problems):
                self.model_config = checked_model(config, data)
        saved = self._find(resume)
        torch.manual_seed(config.seed)
        model = PMI(self.model_config)
        if saved is not None:
            load_weights(model, checkpoint.weights_of(saved))
        elif init_from is not None:
            load_weights(model, initial_weights(init_from, self.model_config, self.data))
        model.to(world.device)
        parameters = sum(p.numel() for p in model.parameters())
        self.blank = blank_state(model, 1)
        objective = Objective(model, config.seed, config.training)
        self.backend = build(objective, config.training, world, self.micro, self.accumulation)
        self.lanes = self._lanes()
        self.states = [self.blank.select([0] * self.micro) for _ in range(self.accumulation)]
        self.step = self.tokens = self.skipped = self.in_a_row = 0
        self.stop = StopRequest()
        if saved is not None:
            self._restore(saved)
        self.report = None
        if world.first:
            self._prepare_folder()
            self.report = Report(
                out, console, total=config.training.steps, done=self.step, per_bit=self.data.tokenizer.kind == "bytes",
                every=config.training.log_interval, flops_per_token=flops_per_token(self.model_config, parameters),
                processes=world.size, device=world.device, port=metrics_port,
            )  # fmt: skip
        if saved is not None:
            self._say(f"resuming {out} behind step {self.step}")
        self._say(
            f"{parameters:,} parameters; a step is {config.training.lanes} lanes x {config.training.segments} segments x "
            f"{self.model_config.segment} tokens = {world.size} processes x {self.accumulation} micro-batches of {self.micro}"
        )

    # --- the loop ----------------------------------------------------------------------------------------------

    def run(self) -> Outcome:
        """Train to the last step, or until a signal asks to stop; the checkpoint is on disk when this returns."""
        config, signal = self.config, 0
        self.backend.train(True)
        while self.step < config.training.steps and not signal:
            signal = self._one_step()
            last = self.step == config.training.steps
            measured = None
            if self.step % config.evaluation.interval == 0 or last:
                measured = self._evaluate()
            if self.step % config.checkpoint.interval == 0 or last or signal:
                self._save(measured)
        return Outcome(self.step, signal)

    def _one_step(self) -> int:
        """One optimiser step over all micro-batches; returns the signal that any process received."""
        training, world = self.config.training, self.world
        where = self.lanes.state_dict()["cursors"]
        batch = self.lanes.next_batch(training.segments)
        mask = batch.mask()
        count = int(world.sum([int(mask.sum())])[0])
        rate = learning_rate(training.optimiser, self.step, training.steps)
        self.backend.optimiser.set_rate(rate)
        after: list[State] = []
        total = 0.0
        for i, state in enumerate(self.states):
            rows = slice(i * self.micro, (i + 1) * self.micro)
            parts = (x[rows].to(world.device) for x in (batch.tokens, batch.targets, mask, batch.starts))
            loss, new = self.backend.forward(*parts, state, self.step, batch.lanes[rows].tolist())
            self.backend.backward(loss, 1 / count)
            total += float(loss.detach())
            after.append(new)
            if i < self.accumulation - 1:
                self.backend.step(hold=False)
        asked = [self.stop.signal == kind for kind in SIGNALS]
        total, square, elements, *stops = world.sum([total, *_memory_square(after), *asked])
        loss_mean, memory = total / count, square / max(1.0, elements)
        signal = next((int(kind) for kind, ranks in zip(SIGNALS, stops, strict=True) if ranks), 0)
        self.backend.step(hold=not (math.isfinite(loss_mean) and math.isfinite(memory)))
        self.step += 1
        applied = self.backend.optimiser.applied
        if applied:
            self.states, self.tokens, self.in_a_row = after, self.tokens + count, 0
        else:
            self._count_skip(batch, where)
        if self.report:
            figures = {
                "loss": loss_mean, "tokens": count, "learning_rate": rate,
                "gradient_norm": self.backend.norm if applied else None,
                "memory_norm": math.sqrt(memory) if self.model_config.memory and math.isfinite(memory) else None,
                "skipped": not applied, "tokens_total": self.tokens, "skipped_total": self.skipped,
            }  # fmt: skip
            self.report.step(self.step, figures if math.isfinite(loss_mean) else {**figures, "loss": None})
        return signal

    def _count_skip(self, batch: Batch, where: dict[str, Any]) -> None:
        """A step that changed nothing: memory stays as it was before, the data has moved on."""
        self.skipped += 1
        self.in_a_row += 1
        self._say(f"step {self.step}: loss or gradient not finite; the step was skipped ({self.in_a_row} in a row)")
        if self.in_a_row >= self.config.training.skip_limit:
            kept = checkpoint.found(self.out)
            raise UserError(
                f"step {self.step}: {self.in_a_row} steps in a row with a loss or gradient that is not finite; the run stops. "
                f"Data position (lane: epoch, document, segment): {where}. "
                f"The last good checkpoint is {kept[0] if kept else 'none'}; lower training.lr and go on from it"
            )

    # --- measuring and saving ----------------------------------------------------------------------------------

    def _evaluate(self) -> float | None:
        if measure.SPLIT not in self.data.manifest.splits:
            self._say(f"{self.data.folder} has no validation split: nothing is measured")
            return None
        config = self.config.evaluation
        loss = measure.validation_loss(
            self.backend, self.data, config, self.model_config, self.blank, self.config.training.segments, self.world
        )
        text = measure.sample(self.backend, config, self.model_config, self.data.tokenizer, self.world)
        if self.report:
            self.report.validation(self.step, loss, text)
        return loss

    def _save(self, validation: float | None) -> None:
        carried: dict[str, torch.Tensor] = {}
        for i, state in enumerate(self.states):
            ids = list(self.lanes.own)[i * self.micro : (i + 1) * self.micro]
            carried.update(checkpoint.lane_tensors(state, ids, self.model_config.window))
        about = {
            "step": self.step,
            "tokens": self.tokens,
            "skipped": self.skipped,
            "in_a_row": self.in_a_row,
            "validation": validation,
            "applied": self.backend.optimiser.count,
            "stream": merge_states(self.world.gather(self.lanes.state_dict())),
            **self._identity(),
        }
        folder = checkpoint.save(self.out, self.world, self.backend, carried, about)
        if self.world.first:
            checkpoint.rotate(self.out, self.config.checkpoint.keep, self.step)
        self._say(f"saved {folder}")

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint can be resumed with only."""
        return {
            "model": self.model_config.model_dump(mode="json"),
            "tokenizer": self.data.tokenizer.fingerprint(),
            "data": self.data.fingerprint,
            "lanes": self.config.training.lanes,
            "seed": self.config.seed,
        }

    # --- resuming ----------------------------------------------------------------------------------------------

    def _find(self, resume: bool) -> checkpoint.Saved | None:
        """The checkpoint to go on from: found by the first process, the same for all."""
        saved, problems = checkpoint.newest_whole(self.out) if self.world.first else (None, [])
        folder, problems = self.world.from_first((saved and str(saved.folder), problems))
        if folder is None:
            if problems:
                raise UserError(
                    [*problems, f"{self.out}: no whole checkpoint; delete {self.out / checkpoint.FOLDER} to start anew"]
                )
            if resume:
                raise UserError(f"--resume: {self.out} has no checkpoint; start the run without --resume")
            return None
        saved = saved or checkpoint.Saved(Path(folder), checkpoint.read_manifest(Path(folder)))
        differ = []
        for key, mine in self._identity().items():
            theirs = saved.manifest[key]
            if key == "model":
                theirs = with_defaults(theirs)
                names = [name for name in mine if mine[name] != theirs.get(name) and name != "dropout"]
                differ += [f"model.{name}: the checkpoint has {theirs.get(name)!r}, this run {mine[name]!r}" for name in names]
            elif mine != theirs:
                differ.append(f"{key}: the checkpoint has {theirs!r}, this run {mine!r}")
        if differ:
            advice = f"{saved.folder} cannot be resumed with these; take its values, or another --out"
            raise UserError([*differ, advice])
        for problem in problems:
            self._say_early(f"passed over: {problem}")
        return saved

    def _restore(self, saved: checkpoint.Saved) -> None:
        moments = checkpoint.TensorFiles(saved.files("moments"))

        def of(name: str) -> dict[str, torch.Tensor]:
            return {moment: moments[f"{name}/{moment}"] for moment in ("exp_avg", "exp_avg_sq")}

        manifest = saved.manifest
        self.backend.restore(manifest["applied"], of)
        self.step, self.tokens = manifest["step"], manifest["tokens"]
        self.skipped, self.in_a_row = manifest["skipped"], manifest["in_a_row"]
        self.lanes.load_state_dict(manifest["stream"])
        files, own = checkpoint.TensorFiles(saved.files("carried")), list(self.lanes.own)
        window = self.model_config.window
        self.states = [
            checkpoint.restore_lanes(self.blank, files, own[i * self.micro : (i + 1) * self.micro], window)
            for i in range(self.accumulation)
        ]
        if manifest["world"] == self.world.size:
            torch.set_rng_state(files[f"generator/{self.world.rank}"])

    # --- small parts -------------------------------------------------------------------------------------------

    def _lanes(self) -> Lanes:
        return Lanes(
            self.data, "train", lanes=self.config.training.lanes, segment=self.model_config.segment, seed=self.config.seed,
            rank=self.world.rank, world=self.world.size,
        )  # fmt: skip

    def _prepare_folder(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        self.data.tokenizer.save(self.out)
        write_atomically(self.out / RUN_FILE, (self.config.model_dump_json(indent=2) + "\n").encode())

    def _say(self, message: str) -> None:
        if self.report:
            self.report.say(message)

    def _say_early(self, message: str) -> None:
        if self.world.first:
            Console(stderr=True).print(message, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        """End the report and give the signals back."""
        self.stop.close()
        if self.report:
            self.report.close()


def checked_model(config: RunConfig, data: Prepared | None) -> ModelConfig:
    """The run's model configuration; UserError where it does not fit the data (if there is any) or cannot learn."""
    model = load_model_config(config.model, config.overrides)
    problems = []
    if data is not None and model.vocab_size != data.tokenizer.vocab_size:
        problems.append(
            f"model.vocab_size: {model.vocab_size}, but the tokenizer of {data.folder} has {data.tokenizer.vocab_size} ids; "
            f"--set model.vocab_size={data.tokenizer.vocab_size}"
        )
    if model.memory is not None and config.training.segments < 2:
        problems.append(
            f"training.segments: {config.training.segments} with memory on: what a segment writes is first read in the next one, "
            "so the memory's writer would get no gradient; take 2 or more, or --set model.memory=off"
        )
    if problems:
        raise UserError(problems)
    return model


def initial_weights(folder: Path, model: ModelConfig, data: Prepared) -> dict[str, torch.Tensor]:
    """The weights of an exported model; UserError where it is another model or has another tokenizer."""
    exported = from_pretrained(folder)
    problems = []
    mine, theirs = model.model_dump(mode="json"), exported.model.config.model_dump(mode="json")
    for name in mine:
        if mine[name] != theirs[name] and name != "dropout":
            problems.append(f"--init-from {folder}: its {name} is {theirs[name]!r}, this run's model has {mine[name]!r}")
    if exported.tokenizer.fingerprint() != data.tokenizer.fingerprint():
        problems.append(
            f"--init-from {folder}: its tokenizer is {exported.tokenizer.fingerprint()}, that of {data.folder} "
            f"{data.tokenizer.fingerprint()}; prepare the data with `pmi data prepare ... --tokenizer {folder}`"
        )
    if problems:
        raise UserError(problems)
    return {name: p.detach() for name, p in exported.model.named_parameters()}


def load_weights(model: PMI, weights: dict[str, torch.Tensor]) -> None:
    """Copy weights by name into a model that is not sharded yet."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.numel():
                parameter.copy_(weights[name])


def _memory_square(states: list[State]) -> tuple[float, int]:
    """Sum of squares and number of elements of all memories; not of verbatim tables, which fill up but cannot grow."""
    levels = [x for state in states for x in tensors(state.memories) if x.numel()]
    return sum(float(x.square().sum()) for x in levels), sum(x.numel() for x in levels)
