"""What `pmi reason run` reads: a task's preset (configs/reason/TASK.yaml) with a model's changes to it (models.yaml there).

config = load_reason_config("babi", "pmi-tr-m", "cpu", ["training.lr=1e-3"])
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from lm.config import MemoryConfig
from lm.config_files import Schema, configs_folder, override, read_mapping, validate
from lm.errors import collecting

PRESETS = ("cpu", "paper")
SIZES = ("s", "m", "l")
TASKS = ("babi", "clevr", "triangles", "cifar")
NAMED = {"task": "TASK", "data.task": "TASK", "model": "--model", "preset": "--preset"}
"""Keys that are no changes to a preset, but which one it is."""


class EncoderConfig(Schema):
    """Layers of one mixing part and a feed-forward network. Which part mixes is what the models differ in."""

    mixer: Literal["memory", "attention", "induced", "sparse", "none"] = "memory"
    """memory: the PMI module. attention: all pairs. induced: set transformer (ISAB). sparse: factorised heads, local and strided
    (Child et al.). none: feed-forward only, on the mean of all positions (pictures)."""
    layers: int = Field(ge=1, le=1024)
    """How often a layer is applied."""
    parameters: Literal["tied", "separate"] = "tied"
    """Whether all layers are one set of weights (the memory's own are `memory.parameters`)."""
    width: int = Field(ge=2, le=65_536)
    """Features per position."""
    heads: int = Field(ge=1)
    """Heads of attention between positions. Must divide `width`."""
    feedforward: int = Field(ge=1, le=1_000_000)
    """Inner width of the feed-forward network."""
    answer: Literal["token", "question"] = "token"
    """Where the answer is read from: a class token at the end, or the question itself, which has one step less to go."""
    dropout: float = Field(0.1, ge=0, lt=1)
    """Dropout on what is perceived and on what each part adds."""
    inducing: int = Field(8, ge=1, le=4_096)
    """Of mixer induced: how many points all positions are gathered to and read from."""
    memory: MemoryConfig | None = None
    """Of mixer memory: as in a language model, but each layer writes first and then reads what it wrote."""

    @field_validator("heads")
    @classmethod
    def _heads_divide(cls, heads: int, info: ValidationInfo) -> int:
        width = info.data.get("width")
        if width and width % heads:
            raise ValueError(f"{heads} does not divide width {width}")
        if heads < 2 and info.data.get("mixer") == "sparse":
            raise ValueError("mixer sparse needs 2 heads or more, for local and for strided ones; raise it")
        return heads

    @field_validator("memory")
    @classmethod
    def _memory_fits(cls, memory: MemoryConfig | None, info: ValidationInfo) -> MemoryConfig | None:
        mixer, width = info.data.get("mixer"), info.data.get("width")
        if (memory is not None) != (mixer == "memory"):
            raise ValueError(
                f"mixer {mixer} {'has no' if memory else 'needs a'} memory; choose a pmi-tr model or set encoder.mixer"
            )
        if memory is None:
            return None
        problems = []
        if memory.consolidation == "delta":
            problems.append("consolidation: delta writes in an order, an encoder's layer writes a set; choose probe or paper")
        if memory.verbatim is not None:
            problems.append("verbatim: what an encoder reads is a set and has no wording; leave it out")
        if width and (memory.width or width) % memory.heads:
            problems.append(f"heads: {memory.heads} does not divide the memory's width {memory.width or width}")
        if memory.layers != "all":
            problems.append(f"layers: {memory.layers} must be all in an encoder")
        if problems:
            raise ValueError("\n".join(problems))
        return memory

    @property
    def memory_width(self) -> int:
        """Width of a memory slot."""
        return (self.memory and self.memory.width) or self.width


class BabiData(Schema):
    """bAbI: sentences, then a question; the answer is one of the words of the training answers."""

    task: Literal["babi"] = "babi"
    tasks: list[Annotated[int, Field(ge=1, le=20)]] = Field(list(range(1, 21)), min_length=1)
    """Which of the 20, all in one training set."""
    sentences: int = Field(ge=1, le=1024)
    """Only the last so many of a story are read."""

    @field_validator("tasks")
    @classmethod
    def _each_once(cls, tasks: list[int]) -> list[int]:
        if len(set(tasks)) < len(tasks):
            raise ValueError("names a task twice; name each once")
        return tasks


class PictureData(Schema):
    """What all tasks with pictures share."""

    patch: int = Field(ge=1)
    """Side of the square patches a picture is cut into; must divide its side."""


class ClevrData(PictureData):
    """Sort-of-CLEVR: 6 objects in 75 x 75 pixels; 10 unary, 10 binary and 10 ternary questions on each picture."""

    task: Literal["clevr"] = "clevr"
    pictures: int = Field(ge=2)
    """Of the training set."""
    held_out: int = Field(ge=1)
    """Pictures of the validation set, and as many of the test set."""
    seed: int = Field(1, ge=0)
    """Of the generator; all runs share the data."""


class TrianglesData(PictureData):
    """Three clusters of points in 64 x 64 pixels: is the triangle of their centres equilateral?"""

    task: Literal["triangles"] = "triangles"
    pictures: int = Field(ge=2)
    held_out: int = Field(ge=2)
    seed: int = Field(1, ge=0)


class CifarData(PictureData):
    """CIFAR-10: 50,000 and 10,000 pictures of 32 x 32 pixels, 10 classes."""

    task: Literal["cifar"] = "cifar"
    held_out: int = Field(5_000, ge=1, lt=50_000)
    """Last training pictures, kept for validation."""


class ReasonTraining(Schema):
    """How a model is trained."""

    epochs: int | None = Field(None, ge=1)
    """Passes over the training set; or give `steps`."""
    steps: int | None = Field(None, ge=1)
    """Steps; or give `epochs`."""
    batch: int = Field(ge=1)
    """Samples per step."""
    pool: int = Field(1, ge=1)
    """Batches that are drawn together and sorted by length, so that less is padding (1: as drawn)."""
    together: int = Field(1, ge=1)
    """Questions about one picture that stand in a batch together, so that it is seen once for all of them."""
    lr: float = Field(gt=0)
    """Learning rate of Adam (of AdamW, with weight decay)."""
    schedule: Literal["constant", "cosine"] = "cosine"
    """After the warm-up: the same rate to the end, or a cosine to a tenth of it."""
    warmup: int = Field(0, ge=0)
    """Steps of linear warm-up."""
    weight_decay: float = Field(0.0, ge=0)
    """On matrices only."""
    clip: float = Field(1.0, gt=0)
    """Largest gradient norm."""
    evaluations: int = Field(20, ge=1)
    """How many points the curve of validation accuracy has."""
    evaluated: int = Field(2_000, ge=1)
    """Most samples of the validation set at each of them (the test set is always read whole)."""

    @model_validator(mode="after")
    def _one_length(self) -> "ReasonTraining":
        if (self.epochs is None) == (self.steps is None):
            raise ValueError(f"give either epochs or steps (epochs {self.epochs}, steps {self.steps})")
        return self


class ReasonConfig(Schema):
    """One model on one task."""

    task: Literal["babi", "clevr", "triangles", "cifar"]
    model: str
    preset: str
    perception: Literal["own", "cnn"] = "own"
    """own: sentences or patches, as the task has it. cnn: four convolutions (tasks with pictures)."""
    encoder: EncoderConfig
    data: BabiData | ClevrData | TrianglesData | CifarData = Field(discriminator="task")
    training: ReasonTraining

    @model_validator(mode="after")
    def _data_of_the_task(self) -> "ReasonConfig":
        if self.data.task != self.task:
            raise ValueError(f"data.task is {self.data.task}, but the task is {self.task}; make them the same")
        return self

    @model_validator(mode="after")
    def _question_to_read_from(self) -> "ReasonConfig":
        if self.encoder.answer == "question" and self.task not in ("babi", "clevr"):
            raise ValueError(f"encoder.answer is question, but {self.task} asks none; choose token")
        return self

    @model_validator(mode="after")
    def _pictures_for_convolutions(self) -> "ReasonConfig":
        if (self.perception == "cnn" or self.encoder.mixer == "none") and self.task == "babi":
            raise ValueError(f"model {self.model} sees pictures through convolutions, but babi has none; choose another model")
        return self


def split_size(model: str) -> tuple[str, str | None]:
    """A model's name without its size, and the size: `tr-hsw-m` is tr-hsw in size m."""
    base, _, size = model.rpartition("-")
    return (base, size) if base and size in SIZES else (model, None)


def reason_models() -> dict[str, dict[str, Any]]:
    """The models by name, each as its changes to a task's preset."""
    return read_mapping(configs_folder() / "reason" / "models.yaml")


def load_reason_config(task: str, model: str, preset: str, overrides: Sequence[str] = ()) -> ReasonConfig:
    """A task's preset with a model's changes, then `key.path=value` overrides."""
    models = reason_models()
    with collecting() as problems:
        if task not in TASKS:
            problems.append(f"task {task!r}: must be one of {', '.join(TASKS)}")
        base, size = split_size(model)
        if base not in models:
            problems.append(f"--model {model!r}: must be one of {', '.join(models)}, each also with a size: -s, -m or -l")
        if preset not in PRESETS:
            problems.append(f"--preset {preset!r}: must be one of {', '.join(PRESETS)}")
    values = read_mapping(configs_folder() / "reason" / f"{task}.yaml")[preset]
    sizes, usual = values.pop("sizes"), values.pop("size")
    values = merged(merged(values, {"encoder": sizes[size or usual]}), models[base])
    if values["encoder"].get("mixer", "memory") != "memory":
        del values["encoder"]["memory"]
    values["data"]["task"] = task
    with collecting() as problems:
        for key in {item.partition("=")[0] for item in overrides} & NAMED.keys():
            problems.append(f"--set {key}: is chosen by {NAMED[key]}; leave it out")
    values = override({"task": task, "model": model, "preset": preset, **values}, overrides)
    return validate(ReasonConfig, values, f"{task}, {model}, {preset}")


def merged(values: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`values` with `changes`; mappings are merged key by key."""
    result = dict(values)
    for key, change in changes.items():
        both = isinstance(change, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], change) if both else change
    return result
