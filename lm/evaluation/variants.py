"""The model as an evaluation wants it: with memory or without, at another segment or window, in another type."""

from typing import Literal

import torch

from lm.errors import UserError, collecting
from lm.model import PMI
from lm.model.pretrained import Checkpoint

Mode = Literal["on", "off", "reset", "shuffled"]
MODES: tuple[Mode, ...] = ("on", "off", "reset", "shuffled")
MEANING: dict[Mode, str] = {
    "on": "carried through each document",
    "off": "ablated: nothing is read from it",
    "reset": "initial memory at each segment, window carried",
    "shuffled": "each document reads the memory of the next one at the same segment",
}
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16}


def variant(
    checkpoint: Checkpoint, memory: bool = True, segment: int | None = None, window: int | None = None, dtype: str = "float32"
) -> PMI:
    """The checkpoint's model with another segment or window, or without its memory; its own if nothing differs."""
    model = checkpoint.model
    with collecting() as problems:
        for name, value, least, most in (("segment", segment, 1, 8_192), ("window", window, 0, 65_536)):
            if value is not None and not least <= value <= most:
                problems.append(f"--{name} {value}: must be {least} to {most:,}")
        if dtype not in DTYPES:
            problems.append(f"--dtype {dtype!r}: must be one of {', '.join(DTYPES)}")
    wanted = {"segment": segment or model.config.segment, "window": model.config.window if window is None else window}
    changed = {key: value for key, value in wanted.items() if getattr(model.config, key) != value}
    if not memory and model.config.memory is not None:
        changed["memory"] = None  # type: ignore[assignment]
    if changed or dtype != "float32":  # a model of its own: the checkpoint's is left as it is
        weights = dict(model.named_parameters())
        with torch.random.fork_rng():  # building a model draws numbers that would be the caller's
            model = PMI(model.config.model_copy(update=changed)).to(model.device).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights[name])
    if dtype == "float64":
        return model.double()
    return model if dtype == "float32" else model.compute_in(DTYPES[dtype])


def refuse_without_memory(checkpoint: Checkpoint, modes: list[Mode]) -> None:
    """UserError where a mode asks for a memory that the checkpoint does not have."""
    if checkpoint.model.config.memory is None and (asked := [mode for mode in modes if mode in ("reset", "shuffled")]):
        raise UserError(
            f"--memory {','.join(asked)}: this checkpoint was trained without memory; only on or off (the same) apply"
        )
