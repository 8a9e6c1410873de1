"""The configuration schema: every key, what it means, what it may be. One pydantic model per part.

A preset is a YAML file in configs/model/. `load_model_config("small", ["memory.layers=[1]"])` reads one and changes a key.
Mistakes are reported all at once, each with its place, its value and what is allowed (lm/errors.py).
"""

import math
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol

from pydantic import (
    Field,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic_core import InitErrorDetails

from lm.config_files import Schema, configs_folder, details, override, read_mapping, validate
from lm.errors import UserError, noting


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
    gates: Literal["soft", "hard"] = "soft"
    """What decides how strongly a token is written and how much of a fragment stays over a segment. soft: a sigmoid, never quite
    none or all, so that enough text wears away anything. hard: a sigmoid stretched and cut, which reaches 0 and 1."""


class VerbatimConfig(Schema):
    """Tables of what followed each wording (memory.verbatim)."""

    contexts: list[Annotated[int, Field(ge=1, le=16)]] = Field([1, 2, 3], min_length=1, max_length=8)
    """One table for each of these lengths: it is addressed by so many of the last tokens."""
    rows: int = Field(2_048, ge=1, le=2**20)
    """Rows of each table. With as many as the vocabulary has ids, each has a row of its own for wordings of one token; longer
    ones share rows by hash."""
    width: int = Field(64, ge=1, le=4_096)
    """Features of a row."""

    @field_validator("contexts")
    @classmethod
    def _contexts_differ(cls, contexts: list[int]) -> list[int]:
        if len(set(contexts)) < len(contexts):
            raise ValueError(f"{contexts} names a length twice; each has one table")
        return contexts


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
    alpha: float = Field(0.7, gt=0, lt=1)
    """Initial share of what is read from working memory against what long-term memory makes of it; learned. At 0 or 1 one of
    the two would never be learned: choose with `read` instead."""
    gate: Literal["unit", "memory", "none"] = "unit"
    """Input and forget gates of working memory: per element, per slot, or none."""
    consolidation: Literal["paper", "probe", "delta"] = "delta"
    """How long-term memory is written: as published (for comparison), by a learned contraction, or by the delta rule."""
    delta: DeltaConfig = DeltaConfig()
    """Settings of consolidation: delta."""
    verbatim: VerbatimConfig | None = None
    """Beside both levels, tables of what followed each wording in the document: one set for the model, read in the memory layers
    (off: none; {}: with their defaults)."""
    read: Literal["both", "working", "long_term"] = "both"
    """Which levels are read. long_term is the paper's w/o 3; working keeps no long-term memory."""
    correction: bool = False
    """Whether what was read from long-term memory attends to what was read from working memory (needs read: both).
    false is the paper's w/o 2."""

    @field_validator("verbatim", mode="before")
    @classmethod
    def _verbatim_off(cls, value: Any) -> Any:
        return None if value is False or value == "off" else value  # YAML reads a bare `off` as false

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
    cutoffs: list[int] = Field([])
    """Where the vocabulary is cut into clusters (adaptive softmax and embedding); empty: one plain softmax."""
    cluster_divide: int = Field(1, ge=1)
    """Each further cluster's embedding is narrower by this factor."""
    memory: MemoryConfig | None = MemoryConfig()
    """The memory, or `off`: a Transformer-XL-like model with the same code."""

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

    @field_validator("memory", mode="wrap")
    @classmethod
    def _memory_fits(cls, value: Any, handler: ValidatorFunctionWrapHandler, info: ValidationInfo) -> MemoryConfig | None:
        if value is None or value is False or value == "off":  # YAML reads a bare `off` as false
            return None
        if not isinstance(value, dict | MemoryConfig):
            raise ValueError("must be off, or a mapping of its keys; set them one by one, such as memory.layers=[1]")
        wrong: list[InitErrorDetails] = []
        try:
            memory: MemoryConfig | None = handler(value)
        except ValidationError as error:  # what is right among the keys is still held against the model
            wrong = [details(dict(item)) for item in error.errors(include_url=False)]
            memory = None
        bad = {str(item["loc"][0]) for item in wrong if item.get("loc")}
        if isinstance(value, dict) and wrong:
            with suppress(ValidationError):
                memory = MemoryConfig.model_validate({key: value[key] for key in value if key not in bad})
        if memory is not None:
            wrong += _unfit(memory, bad, info.data)
        if wrong:
            raise ValidationError.from_exception_data("memory", wrong)
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


def _unfit(memory: MemoryConfig, bad: set[str], model: dict[str, Any]) -> list[InitErrorDetails]:
    """What of a memory does not fit its model; keys that are `bad` in themselves are not looked at."""
    width, layers, segment = memory.width or model.get("width"), model.get("layers"), model.get("segment")
    problems: list[tuple[str, Any, str]] = []
    levels = not bad & {"read", "consolidation", "delta"}
    if width and levels and memory.keeps_working and width % memory.heads and not bad & {"heads", "width"}:
        choice = f"choose one of {_divisors(width)} or set memory.width"
        problems.append(("heads", memory.heads, f"{memory.heads} does not divide the memory's width {width}; {choice}"))
    named = [] if memory.layers == "all" else memory.layers
    if layers and memory.layers != "all" and "layers" not in bad and (not named or any(not 0 <= i < layers for i in named)):
        allowed = f"must name layers 0..{layers - 1}; for no memory at all set memory: off"
        problems.append(("layers", named, f"{named} {allowed}"))
    if segment == 1 and levels and memory.keeps_working:
        why = "a segment of 1 token leaves working memory nothing to choose from, so that its writer would never learn"
        problems.append(("", segment, f"{why}; set segment to 2 or more, or memory: off"))
    if segment == 1 and "verbatim" not in bad and memory.verbatim is not None:
        why = "in a segment of 1 token nothing follows anything, so that verbatim tables would stay empty"
        problems.append(("verbatim", segment, f"{why}; set segment to 2 or more, or memory.verbatim: off"))
    elif segment and "verbatim" not in bad and memory.verbatim is not None and max(memory.verbatim.contexts) >= segment:
        why = f"wordings end with their segment of {segment} tokens and must be shorter"
        problems.append(
            ("verbatim", memory.verbatim.contexts, f"contexts: {why}; leave out those that are not, or raise segment")
        )
    return [
        InitErrorDetails(type="value_error", loc=(key,) if key else (), input=given, ctx={"error": said})
        for key, given, said in problems
    ]


def with_defaults(model: dict[str, Any]) -> dict[str, Any]:
    """A model configuration as an earlier version wrote it, with the keys that have come since; as it is where it is none."""
    with suppress(ValidationError):
        return ModelConfig.model_validate(model).model_dump(mode="json")
    return model


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
    """A preset in configs/model/."""
    overrides: list[str] = Field([])
    """Changes to the model's keys, each `key.path=value`."""
    lanes: int = Field(ge=1)
    """Contiguous parts of the text that are read side by side."""
    segments: int = Field(ge=2)
    """K: segments per step, with gradient through the memory between them."""
    steps: int = Field(ge=1)
    """Optimiser steps."""
    holdout: float = Field(gt=0, lt=0.5)
    """Share of the text that is only measured on."""
    seed: int = Field(0, ge=0)
    """Seed of weights, data order and the sample."""
    prompt: str
    """What the sample of generated text continues."""
    optimiser: OptimiserConfig
    """AdamW and its schedule."""


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
    overrides: list[str] = Field([])
    """Changes to the model's keys, each `key.path=value` (on the command line: --set model.key.path=value)."""
    data: str
    """A folder that `pmi data prepare` wrote."""
    seed: int = Field(0, ge=0)
    """Seed of weights, data order and dropout."""
    training: TrainingConfig
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()


def model_presets() -> list[str]:
    """Names of the presets in configs/model/."""
    return sorted(path.stem for path in (configs_folder() / "model").glob("*.yaml"))


def load_model_config(name_or_path: str, overrides: Sequence[str] = ()) -> ModelConfig:
    """A preset by name, or a YAML/JSON file by path, with `key.path=value` overrides."""
    path = Path(name_or_path)
    if not path.is_file():
        path = configs_folder() / "model" / f"{name_or_path}.yaml"
    problems: list[str] = []
    values: dict[str, Any] = {}
    if path.is_file():
        with noting(problems):
            values = read_mapping(path)
    else:
        problems.append(f"model config {name_or_path!r}: neither a file nor one of the presets {model_presets()}")
    readable = not problems
    changed = override(values, overrides, problems)
    if readable:
        with noting(problems):
            config = validate(ModelConfig, changed, str(name_or_path))
    if problems:
        raise UserError(problems)
    return config


def load_run_config(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The experiment in a YAML file, with `key.path=value` overrides; `model.key=value` changes the model."""
    problems: list[str] = []
    values: dict[str, Any] = {}
    with noting(problems):
        values = read_mapping(path)
    readable = not problems
    model = [item.removeprefix("model.") for item in overrides if item.startswith("model.")]
    changed = override(values, [item for item in overrides if not item.startswith("model.")], problems)
    if not readable:
        override({}, model, problems)
        raise UserError(problems)
    if model and isinstance(changed.get("overrides", []), list):
        changed["overrides"] = [*changed.get("overrides", []), *model]
    with noting(problems):
        config = validate(RunConfig, changed, str(path))
    if not problems:
        return config
    # the model is looked at later, with the data; but whoever mends these should hear of its mistakes at once
    if isinstance(changed.get("model"), str) and _texts(changed.get("overrides", [])):
        with noting(problems):
            load_model_config(changed["model"], changed.get("overrides", []))
    raise UserError(problems)


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})
