"""What `pmi model show` prints: parameters per part, bytes of a snapshot, and the paper's figures beside ours."""

from dataclasses import asdict, dataclass
from typing import Any

import torch

from lm.config import ModelConfig, load_model_config
from lm.config_files import configs_folder
from lm.model.decoder import PMI
from lm.model.snapshot import sizes

PAPER = {
    "enwik8": "paper: 45M (table 'test bits-per-character on Enwik8'). The decoder is the same size; the paper does not say "
    "what its memory adds. Ours shares one set of memory weights and folds the output into one projection.",
    "wikitext103": "paper: 233M with 16 layers, 116M with 8, so 14.6M per layer; but a layer of 410/2100 has 2.4M, and 267,735 "
    "words of 410 features 110M. So the paper's layers carry parts of their own that it does not describe; ours share one set.",
    "pg19": "paper: gives no parameter count for PG-19.",
}
"""What the paper says of each preset, and why ours differs."""


@dataclass(frozen=True)
class Summary:
    """Sizes of a configuration."""

    name: str
    parameters: dict[str, int]
    total: int
    memory_bytes: int
    window_bytes: int
    notes: list[str]

    def row(self) -> dict[str, Any]:
        """As a JSON object."""
        return asdict(self)


def summarise(name: str, config: ModelConfig) -> Summary:
    """Count without allocating: the model is built on the meta device."""
    with torch.device("meta"):
        model = PMI(config)
    parts = {
        "embedding (tied with the output)": model.embedding,
        "output clusters": model.head,
        "attention": [block.attention for block in model.blocks],
        "feed-forward": [[block.rise, block.fall] for block in model.blocks],
        "memory": model.memories,
        "verbatim tables' write": model.verbatim if model.wordings else [],
        "initial memory": model.initial_memory,
    }
    counted: set[int] = set()
    parameters = {part: _count(modules, counted) for part, modules in parts.items()}
    parameters["norms"] = _count(model, counted)
    memory_bytes, window_bytes = sizes(model)
    notes = _notes(name, config)
    if config.memory is None:
        notes.append("memory off: the window is all the model knows of earlier segments")
    return Summary(name, {k: v for k, v in parameters.items() if v}, sum(parameters.values()), memory_bytes, window_bytes, notes)


def _notes(name: str, config: ModelConfig) -> list[str]:
    """What the paper says of this configuration: a preset's, by whatever name it came; of a changed one, what was changed."""
    mine = config.model_dump()
    for preset, note in PAPER.items():
        theirs = load_model_config(str(configs_folder() / "model" / f"{preset}.yaml")).model_dump()
        if mine == theirs:
            return [note]
        if preset == name:
            changed = [key for key in mine if mine[key] != theirs[key]]
            return [f"changed from the preset in {', '.join(changed)}: the paper's figures for {preset} are not this model's"]
    return []


def _count(modules: Any, counted: set[int]) -> int:
    """Parameters of modules (nested lists of them), each tensor once."""
    if isinstance(modules, list):
        return sum(_count(module, counted) for module in modules)
    new = [p for p in modules.parameters() if id(p) not in counted]
    counted.update(map(id, new))
    return sum(p.numel() for p in new)
