"""`pmi export`: a checkpoint's weights as a model folder, whatever stage and number of processes it was trained with."""

from pathlib import Path

from lm.config import ModelConfig
from lm.config_files import validate
from lm.data.tokenizer import load_tokenizer
from lm.errors import UserError
from lm.model import PMI
from lm.model.pretrained import fingerprint, save_pretrained
from lm.training import checkpoint
from lm.training.trainer import load_weights


def export_model(run: Path, out: Path, step: int | None, best: bool) -> tuple[Path, str]:
    """Write the model; returns the checkpoint's folder and the model's fingerprint."""
    saved = _chosen(run, step, best)
    model = PMI(validate(ModelConfig, saved.manifest["model"], str(saved.folder)))
    load_weights(model, checkpoint.weights_of(saved))
    tokenizer = load_tokenizer(run)
    if tokenizer.fingerprint() != saved.manifest["tokenizer"]:
        raise UserError(
            f"{run}: its tokenizer is {tokenizer.fingerprint()}, the checkpoint's is {saved.manifest['tokenizer']}; "
            "restore tokenizer.json"
        )
    save_pretrained(model, tokenizer, out)
    return saved.folder, fingerprint(model)


def _chosen(run: Path, step: int | None, best: bool) -> checkpoint.Saved:
    if step is not None and best:
        raise UserError("--step and --best: give one of them")
    folders = checkpoint.found(run)
    steps = [checkpoint.step_of(folder) for folder in folders]
    if not folders:
        raise UserError(f"{run}: no checkpoints there; give the folder that was `pmi train`'s --out")
    if step is not None:
        if step not in steps:
            raise UserError(f"--step {step}: {run} has checkpoints of the steps {sorted(steps)}")
        return checkpoint.read(folders[steps.index(step)])
    if best:
        folder = checkpoint.best(run)
        if folder is None:
            raise UserError(
                f"--best: no checkpoint of {run} has a validation; leave the flag out, or give --step {sorted(steps)}"
            )
        return checkpoint.read(folder)
    saved, problems = checkpoint.newest_whole(run)
    if saved is None:
        raise UserError([*problems, f"{run}: no checkpoint is whole"])
    return saved
