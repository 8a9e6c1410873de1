"""Checkpoints of a run: whole or absent, readable at any number of processes and any stage of ZeRO.

RUN/checkpoints/step-00001000/
    weights-0.safetensors ...   weights by name, whole tensors, each in one rank's file
    moments-0.safetensors ...   the optimiser's moments of the same
    carried-0.safetensors ...   memory and window of each lane by its id, and the rank's generator
    manifest.json               step, data cursors, identity of model, tokenizer and data, checksum of every file

All ranks write into a folder with another name; when every file is on disk and checksummed, the first rank writes the manifest
and renames the folder. So a folder with the right name is whole. Loading still compares every checksum, and takes an older
checkpoint where one is damaged.
"""

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from lm.data.files import sha256_of, sync_folder, write_atomically
from lm.errors import UserError
from lm.model import State
from lm.model.state import named_tensors
from lm.training.backends import Backend
from lm.training.world import World

FORMAT = 1
FOLDER, MANIFEST = "checkpoints", "manifest.json"


@dataclass(frozen=True)
class Saved:
    """A checkpoint on disk."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        """Steps that it has behind it."""
        return int(self.manifest["step"])

    def files(self, kind: str) -> list[Path]:
        """Its files of a kind: weights, moments, carried."""
        return [self.folder / name for name in sorted(self.manifest["files"]) if name.startswith(f"{kind}-")]


class TensorFiles:
    """Tensors by name over several safetensors files, read when asked for."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = [safe_open(path, framework="pt") for path in paths]
        self._where = {name: file for file in self._files for name in file.keys()}  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def __getitem__(self, name: str) -> Tensor:
        return self._where[name].get_tensor(name)

    def names(self) -> list[str]:
        """All names."""
        return list(self._where)


def save(run: Path, world: World, backend: Backend, carried: dict[str, Tensor], about: dict[str, Any]) -> Path:
    """Write the checkpoint of `about["step"]`, all ranks together; it is whole when this returns."""
    final = run / FOLDER / f"step-{about['step']:08}"
    part = final.with_name(f".{final.name}.part")
    if world.first:
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
    world.barrier()
    weights: dict[str, Tensor] = {}
    moments: dict[str, Tensor] = {}
    load = [0] * world.size
    for name, gather in backend.weights():
        value, further = gather(), backend.moments(name)
        owner = load.index(min(load))  # every rank counts alike, and keeps what falls to it
        load[owner] += value.numel()
        if owner == world.rank:
            weights[name] = _settled(value)
            moments.update({f"{name}/{moment}": _settled(x) for moment, x in further.items()})
    carried = {**carried, f"generator/{world.rank}": torch.get_rng_state()}
    written = {}
    for kind, tensors in (("weights", weights), ("moments", moments), ("carried", carried)):
        file = part / f"{kind}-{world.rank}.safetensors"
        written[file.name] = write_tensors(file, tensors)
    files = {name: entry for own in world.gather(written) for name, entry in own.items()}
    if world.first:
        manifest = {"format": FORMAT, **about, "world": world.size, "files": files}
        write_atomically(part / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())
        if final.exists():  # left by a run that went on from an earlier checkpoint, because this one was damaged
            shutil.rmtree(final)
        os.rename(part, final)
        sync_folder(final.parent)
    world.barrier()
    return final


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write a safetensors file through to the disk; returns its size and checksum."""
    save_file(tensors, path)
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": sha256_of(path)}


def _settled(x: Tensor) -> Tensor:
    return x.detach().to("cpu", torch.float32).contiguous().clone()


def found(run: Path) -> list[Path]:
    """The folders of a run's checkpoints, newest first."""
    return sorted((run / FOLDER).glob("step-*"), reverse=True)


def read_manifest(folder: Path) -> dict[str, Any]:
    """A checkpoint's manifest."""
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        dict(manifest["files"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{folder}: no manifest that can be read ({error})") from error
    if manifest.get("format") != FORMAT:
        raise UserError(f"{folder}: format {manifest.get('format')!r}; this version reads format {FORMAT}")
    return manifest


def read(folder: Path) -> Saved:
    """A checkpoint, every checksum compared; UserError says what is wrong with it."""
    manifest = read_manifest(folder)
    for name, entry in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise UserError(f"{path}: missing")
        if path.stat().st_size != entry["bytes"] or sha256_of(path) != entry["sha256"]:
            raise UserError(f"{path}: damaged, its content is not what was saved")
    return Saved(folder, manifest)


def newest_whole(run: Path) -> tuple[Saved | None, list[str]]:
    """The newest checkpoint that is whole (None: there is none), and what is wrong with newer ones."""
    problems: list[str] = []
    for folder in found(run):
        try:
            return read(folder), problems
        except UserError as error:
            problems += error.problems
    return None, problems


def rotate(run: Path, keep: int, step: int) -> None:
    """Delete all but the newest `keep` checkpoints up to `step` and the one with the best validation loss.

    What lies ahead of `step` was passed over as damaged when the run went on from an earlier one: it must not count as newest.
    """
    folders = found(run)
    ahead = [folder for folder in folders if step_of(folder) > step]
    kept = [folder for folder in folders if folder not in ahead]
    for folder in [*ahead, *(folder for folder in kept[keep:] if folder != best(run, step))]:
        os.rename(folder, folder.with_name(f".{folder.name}.old"))  # a deletion cut short leaves nothing that looks whole
    for leftover in (run / FOLDER).glob(".step-*"):
        shutil.rmtree(leftover)


def step_of(folder: Path) -> int:
    """The step that a checkpoint's folder is named after."""
    return int(folder.name.removeprefix("step-"))


def best(run: Path, step: int | None = None) -> Path | None:
    """The checkpoint with the best validation loss (up to `step`)."""
    folders = [folder for folder in found(run) if step is None or step_of(folder) <= step]
    scored = [(score, folder) for folder in folders if (score := _validation(folder)) is not None]
    return min(scored)[1] if scored else None


def _validation(folder: Path) -> float | None:
    try:
        value = json.loads((folder / MANIFEST).read_text()).get("validation")
    except (OSError, ValueError):
        return None
    return None if value is None else float(value)


def lane_tensors(state: State, lanes: list[int], window: int) -> Iterator[tuple[str, Tensor]]:
    """What has to be kept of a state at a boundary, by lane: memory, window and position."""
    for row, lane in enumerate(lanes):
        for name, x in _kept(state, window):
            yield f"lane/{lane}/{name}", x[row].detach().cpu().clone()


def restore_lanes(blank: State, files: TensorFiles, lanes: list[int], window: int) -> State:
    """The state of `lanes` from saved tensors; `blank` is one lane of the same model."""
    states = []
    for lane in lanes:
        one = blank.clone()
        filled = {}
        for name, x in _kept(one, window):
            value = files[f"lane/{lane}/{name}"]
            if name.startswith(("keys", "values")):
                whole = torch.zeros(*_cache(one), dtype=value.dtype, device=x.device)
                whole[:, :window] = value.to(x.device)
                filled[name] = whole
            else:
                filled[name] = value[None].to(x.device)
        layers, count = range(len(one.keys)), range(len(one.memories))
        states.append(
            one._replace(
                position=filled["position"],
                keys=tuple(filled[f"keys.{i}"] for i in layers),
                values=tuple(filled[f"values.{i}"] for i in layers),
                memories=tuple(
                    type(one.memories[i])(filled[f"memories.{i}.working"], filled[f"memories.{i}.long_term"]) for i in count
                ),
                verbatim=filled.get("verbatim", one.verbatim),
            )
        )
    return State.concatenate(states)


def _cache(state: State) -> tuple[int, ...]:
    return tuple(state.keys[0].shape)


def _kept(state: State, window: int) -> Iterator[tuple[str, Tensor]]:
    yield "position", state.position
    for name in ("keys", "values"):
        for i, x in enumerate(getattr(state, name)):
            yield f"{name}.{i}", x[:, :window]
    yield from named_tensors(state.memories, "memories")
    if state.verbatim.numel():
        yield "verbatim", state.verbatim


def weights_of(saved: Saved) -> dict[str, Tensor]:
    """All weights of a checkpoint, by name."""
    try:
        files = TensorFiles(saved.files("weights"))
        return {name: files[name] for name in files.names()}
    except (SafetensorError, OSError) as error:
        raise UserError(f"{saved.folder}: its weights cannot be read ({error})") from error
