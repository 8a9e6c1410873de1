"""The configuration schema: every key, what it means, what it may be. One pydantic model per part.

A preset is a YAML file in configs/model/. `load_model_config("small", ["memory.layers=[1]"])` reads one and changes a key.
Mistakes are reported all at once, each with its place, its value and what is allowed (lm/errors.py).
"""

import json
import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from lm.errors import UserError, collecting, from_validation


class Schema(BaseModel):
    """Base of all configuration parts: unknown keys are errors, values do not change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class DeltaConfig(Schema):
    """Long-term memory as associative matrices (consolidation: delta)."""

    source: Literal["tokens", "slots", "both"] = "tokens"
    """What is written: associations between a segment's tokens, between the working slots, or both, in this order."""
    key_width: int = Field(32, ge=1, le=4_096)
    """Rows of each fragment's matrix."""
    value_width: int = Field(32, ge=1, le=4_096)
    """Columns of each fragment's matrix."""
    convolution: int = Field(3, ge=1, le=64)
    """Width of the causal convolution over a segment's keys (1: none), so that neighbours can be bound."""
    top_k: int | None = Field(None, ge=1)
    """Competition among a segment's writes: only the strongest are kept in each fragment (null: all)."""


class MemoryConfig(Schema):
    """The two-level memory. Defaults are the paper's sizes; the ablations of the paper are values of these keys."""

    scope: Literal["global", "layer"] = "layer"
    """global: one memory for all memory layers (the paper's). layer: each memory layer keeps its own."""
    parameters: Literal["tied", "separate"] = "separate"
    """Whether the memory layers share one set of weights."""
    layers: Literal["all"] | list[int] = "all"
    """Which decoder layers carry memory, counted from 0."""
    slots: int = Field(8, ge=2, le=4_096)
    """N: slots of working memory (and of each long-term fragment); with a single one there would be nothing to choose."""
    fragments: int = Field(5, ge=1, le=4_096)
    """C: fragments of long-term memory."""
    top_k: int | None = Field(5, ge=1)
    """Winners of the competition to be written and of the long-term read, per slot and head (null: soft competition)."""
    mlp_layers: int = Field(4, ge=1, le=64)
    """Layers of the network that turns what was attended into the candidate for working memory."""
    heads: int = Field(8, ge=1, le=1_024)
    """Heads of all memory attention."""
    width: int | None = Field(None, ge=1, le=65_536)
    """Width of a slot (null: the model's width). Must be a multiple of `heads`."""
    alpha: float = Field(0.7, ge=0, le=1)
    """Initial share of what is read from working memory against what long-term memory makes of it; learned."""
    gate: Literal["unit", "memory", "none"] = "unit"
    """Input and forget gates of working memory: per element, per slot, or none."""
    consolidation: Literal["paper", "probe", "delta"] = "delta"
    """How long-term memory is written: as published (for comparison), by a learned contraction, or by the delta rule."""
    delta: DeltaConfig = DeltaConfig()
    """Settings of consolidation: delta."""
    read: Literal["both", "working", "long_term"] = "both"
    """Which levels are read. long_term is the paper's w/o 3; working keeps no long-term memory."""
    correction: bool = False
    """Whether what was read from long-term memory attends to what was read from working memory (needs read: both).
    false is the paper's w/o 2."""

    @field_validator("correction")
    @classmethod
    def _correction_needs_both(cls, correction: bool, info: ValidationInfo) -> bool:
        read = info.data.get("read", "both")
        if correction and read != "both":
            raise ValueError(f"true needs memory.read: both, not {read}; set memory.correction: false or memory.read: both")
        return correction

    @property
    def keeps_working(self) -> bool:
        """Whether working memory is kept (anything reads it or consolidates it)."""
        slots_consolidated = self.consolidation != "delta" or self.delta.source != "tokens"
        return self.read != "long_term" or slots_consolidated

    @property
    def keeps_long_term(self) -> bool:
        """Whether long-term memory is kept (something reads it)."""
        return self.read != "working"


class Remembering(Protocol):
    """A configuration of anything that carries the memory: the decoder's, the reasoning encoder's."""

    @property
    def width(self) -> int:
        """Features per token."""

    @property
    def memory(self) -> MemoryConfig | None:
        """The memory, if there is one."""

    @property
    def memory_width(self) -> int:
        """Width of a memory slot."""


class ModelConfig(Schema):
    """A decoder with (or without) memory."""

    vocab_size: int = Field(ge=2, le=10_000_000)
    """Number of token ids, BOS included."""
    layers: int = Field(ge=1, le=1024)
    """Decoder layers."""
    width: int = Field(ge=2, le=65_536)
    """Features per token."""
    heads: int = Field(ge=1)
    """Attention heads. Must divide `width`."""
    feedforward: int = Field(ge=1, le=1_000_000)
    """Inner width of the feed-forward network."""
    segment: int = Field(ge=1, le=8_192)
    """T: tokens per segment. Memory is written when a segment is complete and first read in the next one."""
    window: int = Field(ge=0, le=65_536)
    """W: keys and values of earlier segments that attention sees besides its own segment."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout on the embedding and on what each part adds to the residual stream."""
    embedding_std: float = Field(0.1, gt=0)
    """Standard deviation of the initial embedding. Small values (0.02) drown a token's identity after one layer."""
    rotary_base: float = Field(10_000.0, gt=1)
    """Base of the rotary angles."""
    cutoffs: list[int] = []
    """Where the vocabulary is cut into clusters (adaptive softmax and embedding); empty: one plain softmax."""
    cluster_divide: int = Field(1, ge=1)
    """Each further cluster's embedding is narrower by this factor."""
    memory: MemoryConfig | None = MemoryConfig()
    """The memory, or `off`: a Transformer-XL-like model with the same code."""

    @field_validator("memory", mode="before")
    @classmethod
    def _off(cls, value: Any) -> Any:
        # YAML reads a bare `off` as false
        return None if value in ("off", False) else value

    # what must fit together is checked with the later of the keys, so that one bad key does not hide another

    @field_validator("heads")
    @classmethod
    def _heads_divide(cls, heads: int, info: ValidationInfo) -> int:
        width = info.data.get("width")
        if width and width % heads:
            raise ValueError(f"{heads} does not divide width {width}; choose one of {_divisors(width)}")
        if width and width // heads < 2:
            raise ValueError(f"{heads} leaves {width // heads} feature per head; rotary needs 2 at least")
        return heads

    @field_validator("cutoffs")
    @classmethod
    def _cutoffs_rise(cls, cutoffs: list[int], info: ValidationInfo) -> list[int]:
        size = info.data.get("vocab_size", math.inf)
        if cutoffs != sorted(set(cutoffs)) or any(not 0 < c < size for c in cutoffs):
            raise ValueError(f"{cutoffs} must rise strictly between 0 and vocab_size {size}")
        return cutoffs

    @field_validator("memory")
    @classmethod
    def _memory_fits(cls, memory: MemoryConfig | None, info: ValidationInfo) -> MemoryConfig | None:
        if memory is None:
            return None
        problems = []
        width, layers = memory.width or info.data.get("width"), info.data.get("layers")
        if width and memory.keeps_working and width % memory.heads:
            problems.append(
                f"heads: {memory.heads} does not divide the memory's width {width}; "
                f"choose one of {_divisors(width)} or set memory.width"
            )
        if layers and memory.layers != "all" and (not memory.layers or any(not 0 <= i < layers for i in memory.layers)):
            problems.append(f"layers: {memory.layers} must name layers 0..{layers - 1}; for no memory at all set memory: off")
        if problems:
            raise ValueError("\n".join(problems))
        return memory

    @property
    def memory_layers(self) -> list[int]:
        """Indices of the decoder layers that carry memory, in order."""
        if self.memory is None:
            return []
        return list(range(self.layers)) if self.memory.layers == "all" else sorted(set(self.memory.layers))

    @property
    def memory_width(self) -> int:
        """Width of a memory slot."""
        return (self.memory and self.memory.width) or self.width


class OptimiserConfig(Schema):
    """AdamW and its schedule."""

    lr: float = Field(gt=0)
    """Peak learning rate."""
    warmup: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """On matrices only."""
    clip: float = Field(1.0, gt=0)
    """Largest gradient norm."""


class DemoConfig(Schema):
    """What `pmi demo` trains (configs/train/demo.yaml)."""

    model: str
    overrides: list[str] = []
    lanes: int = Field(ge=1)
    segments: int = Field(ge=2)
    steps: int = Field(ge=1)
    holdout: float = Field(gt=0, lt=0.5)
    seed: int = 0
    prompt: str
    optimiser: OptimiserConfig


class TrainingConfig(Schema):
    """How a model is trained: what one step reads, the optimiser, precision, and what runs it."""

    steps: int = Field(ge=1)
    """Optimiser steps of the whole run (the schedule's length)."""
    lanes: int = Field(ge=1)
    """L: streams of text read side by side, over all processes. Each carries its own memory."""
    micro_batch: int | None = Field(None, ge=1)
    """Lanes per forward pass of one process (null: all of its lanes). Accumulation is L / (micro_batch x processes)."""
    segments: int = Field(ge=1)
    """K: segments per step, with gradient through the memory between them; 2 or more unless memory is off."""
    lr: float = Field(gt=0)
    """Peak learning rate of AdamW."""
    warmup: int = Field(0, ge=0)
    """Steps of linear warm-up; a cosine to a tenth of the peak follows."""
    weight_decay: float = Field(0.0, ge=0)
    """On matrices only."""
    clip: float = Field(1.0, gt=0)
    """Largest gradient norm."""
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: autocast; weights, optimiser and memory stay float32."""
    compile: bool = False
    """Compile attention and feed-forward with torch.compile: a minute or so at the start."""
    activation_checkpointing: bool = False
    """Compute attention and feed-forward again in the backward pass instead of keeping what they made."""
    backend: Literal["deepspeed", "plain"] = "deepspeed"
    """plain: torch alone, one process; what DeepSpeed is tested against."""
    deepspeed: str = "zero1"
    """A file in configs/deepspeed/ by name, or the path of a DeepSpeed JSON file."""
    log_interval: int = Field(10, ge=1)
    """Steps between lines of progress."""
    skip_limit: int = Field(10, ge=1)
    """After so many steps in a row with a loss or gradient that is not finite, the run stops."""
    timeout: int = Field(600, ge=10)
    """Seconds that a process waits for the others before it gives up."""

    @property
    def optimiser(self) -> OptimiserConfig:
        """The optimiser's part."""
        return OptimiserConfig(lr=self.lr, warmup=self.warmup, weight_decay=self.weight_decay, clip=self.clip)


class EvaluationConfig(Schema):
    """Measuring while training."""

    interval: int = Field(1000, ge=1)
    """Steps between validations (and after the last step)."""
    tokens: int = Field(500_000, ge=1)
    """Most tokens of the validation split to read, memory carried, in `lanes` stretches side by side."""
    lanes: int = Field(8, ge=1)
    """Stretches that the split is read in; every process needs one."""
    prompt: str = "The "
    """What the sample of generated text continues."""
    sample: int = Field(200, ge=0)
    """Tokens of the sample (0: none)."""


class CheckpointConfig(Schema):
    """Saving while training."""

    interval: int = Field(1000, ge=1)
    """Steps between checkpoints (and after the last step)."""
    keep: int = Field(2, ge=1)
    """Newest checkpoints that are kept; the one with the best validation is kept besides."""


class RunConfig(Schema):
    """One experiment (configs/train/NAME.yaml): what `pmi train` reads."""

    model: str
    """A preset in configs/model/ or a file's path."""
    overrides: list[str] = []
    """Changes to the model's keys, each `key.path=value` (on the command line: --set model.key.path=value)."""
    data: str
    """A folder that `pmi data prepare` wrote."""
    seed: int = Field(0, ge=0)
    """Seed of weights, data order and dropout."""
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


AnySchema = TypeVar("AnySchema", bound=Schema)


def configs_folder() -> Path:
    """The shipped configuration files: inside the package, or beside it in a checkout."""
    packaged = Path(str(resources.files("lm"))) / "configs"
    return packaged if packaged.is_dir() else Path(__file__).parent.parent / "configs"


def model_presets() -> list[str]:
    """Names of the presets in configs/model/."""
    return sorted(path.stem for path in (configs_folder() / "model").glob("*.yaml"))


def load_model_config(name_or_path: str, overrides: Sequence[str] = ()) -> ModelConfig:
    """A preset by name, or a YAML/JSON file by path, with `key.path=value` overrides."""
    path = Path(name_or_path)
    if not path.is_file():
        path = configs_folder() / "model" / f"{name_or_path}.yaml"
    if not path.is_file():
        raise UserError(f"model config {name_or_path!r}: neither a file nor one of the presets {model_presets()}")
    return validate(ModelConfig, override(read_mapping(path), overrides), str(name_or_path))


def load_run_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The experiment in a YAML file, with `key.path=value` overrides; `model.key=value` changes the model."""
    values = read_mapping(path)
    own = [item for item in overrides if not item.startswith("model.")]
    model = [item.removeprefix("model.") for item in overrides if item.startswith("model.")]
    values = override(values, own)
    if model:
        values["overrides"] = [*values.get("overrides", []), *model]
    return validate(RunConfig, values, str(path))


def load_config(schema: type[AnySchema], name: str) -> AnySchema:
    """A shipped configuration file by its name in configs/, without the suffix."""
    return validate(schema, read_mapping(configs_folder() / f"{name}.yaml"), name)


def read_mapping(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file."""
    try:
        text = path.read_text()
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"{path}: cannot be read as a configuration: {error}") from error
    if not isinstance(value, dict):
        raise UserError(f"{path}: holds {type(value).__name__}, but a configuration is a mapping of keys to values")
    return value


def override(values: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`values` with each `key.path=value` applied; values are read as YAML."""
    result: dict[str, Any] = json.loads(json.dumps(values))
    with collecting() as problems:
        for item in overrides:
            key, equals, text = item.partition("=")
            if not equals or not key:
                problems.append(f"--set {item!r}: must look like key.path=value, for example memory.top_k=null")
                continue
            try:
                value = yaml.safe_load(text)
            except yaml.YAMLError:
                problems.append(f"--set {item!r}: {text!r} is not a YAML value; quote it, or write lists as [1, 2]")
                continue
            *parents, last = key.split(".")
            place = result
            for part in parents:
                if not isinstance(place.get(part), dict):
                    place[part] = {}
                place = place[part]
            place[last] = value
    return result


def validate(schema: type[AnySchema], values: dict[str, Any], source: str) -> AnySchema:
    """`values` as `schema`; UserError with every problem otherwise."""
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise from_validation(error, source) from error


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})
