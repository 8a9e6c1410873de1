"""Where compiled torch extensions live: one folder per environment, so that what set-up built is what every process finds."""

import os
import sys
from pathlib import Path


def use() -> Path:
    """Point torch at the environment's folder of compiled extensions (unless the user chose another) and return it."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if not _cuda() else "cuda")
    return Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(Path(sys.prefix) / "torch_extensions")))


def built(name: str) -> bool:
    """Whether the extension `name` is compiled and no build of it was left half-way."""
    folder = use() / name
    return any(folder.glob("*.so")) and not (folder / "lock").exists()


def remove_locks() -> list[Path]:
    """Delete the lock files that a killed compilation leaves behind; returns what was removed."""
    locks = list(use().glob("*/lock"))
    for lock in locks:
        lock.unlink(missing_ok=True)
    return locks


def _cuda() -> bool:
    import torch

    return torch.cuda.is_available()
