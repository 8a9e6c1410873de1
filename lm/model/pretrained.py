"""A model as a folder: `config.json`, `model.safetensors` and the tokenizer. What every other part loads.

checkpoint = from_pretrained(Path("runs/demo/model"))
checkpoint.model, checkpoint.tokenizer, checkpoint.fingerprint
"""

import hashlib
import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from lm.config import ModelConfig
from lm.config_files import read_mapping, validate
from lm.data.tokenizer import Tokenizer, load_tokenizer
from lm.errors import UserError
from lm.model.decoder import PMI
from lm.model.snapshot import Identity
from lm.model.state import raw_bytes

FORMAT = 1
"""Version of the folder's layout."""
CONFIG, WEIGHTS = "config.json", "model.safetensors"


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to use, with the tokenizer it was trained with."""

    model: PMI
    tokenizer: Tokenizer
    fingerprint: str
    """Hash of the configuration and all weights."""

    @property
    def identity(self) -> Identity:
        """What snapshots made with this model and tokenizer belong to."""
        return Identity(self.fingerprint, self.tokenizer.fingerprint())


def fingerprint(model: PMI) -> str:
    """A short hash of the model's configuration and weights."""
    # without defaults: a key that a later version adds leaves the sessions of older models theirs
    digest = hashlib.sha256(model.config.model_dump_json(exclude_defaults=True).encode())
    for name, parameter in sorted(model.named_parameters()):
        digest.update(name.encode())
        digest.update(raw_bytes(parameter))
    return digest.hexdigest()[:16]


def save_pretrained(model: PMI, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the model to `folder`. Each file appears whole or not at all, the weights last."""
    if tokenizer.vocab_size != model.config.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}: they do not belong together"
        )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(folder)
    description = {"format": FORMAT, "model": model.config.model_dump(mode="json")}
    part = folder / f".{CONFIG}.part"
    part.write_text(json.dumps(description, indent=2) + "\n")
    os.replace(part, folder / CONFIG)
    part = folder / f".{WEIGHTS}.part"
    # named_parameters gives a tied tensor once
    save_file(
        {name: p.detach().cpu().contiguous() for name, p in model.named_parameters()}, part, metadata={"format": str(FORMAT)}
    )
    shutil.copymode(folder / CONFIG, part)  # safetensors lets the owner alone read; a service is another user
    with part.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(part, folder / WEIGHTS)


def check_folder(folder: Path) -> None:
    """UserError unless `folder` has the files of a model."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise UserError(f"{folder}: no {name} there; a model folder is what `pmi demo` or an export writes")
        if not os.access(folder / name, os.R_OK):
            raise UserError(f"{folder / name}: this process may not read it; try `chmod a+r {folder / name}`")


def from_pretrained(folder: Path, device: torch.device | str = "cpu") -> Checkpoint:
    """The model in `folder`, in evaluation mode; UserError says what is wrong with it otherwise."""
    check_folder(folder)
    description = read_mapping(folder / CONFIG)
    if description.get("format") != FORMAT:
        raise UserError(f"{folder / CONFIG}: format {description.get('format')!r}; this version reads format {FORMAT}")
    config = validate(ModelConfig, description.get("model", {}), str(folder / CONFIG))
    with torch.device("meta"):  # nothing is allocated for a configuration that the weights do not bear out
        shapes = {name: list(p.shape) for name, p in PMI(config).named_parameters()}
    try:
        with safe_open(folder / WEIGHTS, "pt") as file:
            found = {name: list(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
        weights = load_file(folder / WEIGHTS) if found == shapes else {}
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"{folder / WEIGHTS}: damaged or not safetensors ({error}); copy or export the model again") from error
    problems = [f"{folder / WEIGHTS}: tensor {name!r} is missing" for name in shapes.keys() - found.keys()]
    problems += [f"{folder / WEIGHTS}: tensor {name!r} is not part of this model" for name in found.keys() - shapes.keys()]
    for name in sorted(shapes.keys() & found.keys()):
        if shapes[name] != found[name]:
            problems.append(f"{folder / WEIGHTS}: tensor {name!r} is {found[name]}, {CONFIG} says {shapes[name]}")
    if problems:
        raise UserError(sorted(problems))
    model = PMI(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    tokenizer = load_tokenizer(folder)
    if tokenizer.vocab_size != model.config.vocab_size:
        raise UserError(f"{folder}: the tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}")
    return Checkpoint(model.to(device).eval(), tokenizer, fingerprint(model))


def devices() -> list[str]:
    """The devices of this machine that a model can run on."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return ["cpu", *(["cuda"] if count else []), *(f"cuda:{number}" for number in range(count))]


def resolve_device(name: str, key: str = "--device") -> torch.device:
    """`auto` (a GPU where there is one), or a device of this machine; UserError otherwise. GPUs are untested so far."""
    present = devices()
    if name == "auto":
        return torch.device("cuda" if "cuda" in present else "cpu")
    if name not in present:
        raise UserError(
            f"{key} {name!r}: not a device of this machine, which has {', '.join(present)}; give one of these, or auto"
        )
    return torch.device(name)
