"""A model folder comes back exactly, and a damaged or foreign one is refused with every problem named."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from lm.config import ModelConfig, load_model_config, model_presets
from lm.data.tokenizer import ByteTokenizer
from lm.errors import UserError
from lm.model import PMI
from lm.model.pretrained import fingerprint, from_pretrained, resolve_device, save_pretrained


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    save_pretrained(PMI(load_model_config("tiny")), ByteTokenizer(), tmp_path / "model")
    return tmp_path / "model"


def test_a_saved_model_comes_back_with_its_tokenizer_and_fingerprint(folder: Path) -> None:
    one, two = from_pretrained(folder), from_pretrained(folder)
    assert one.fingerprint == two.fingerprint
    assert one.tokenizer.fingerprint() == ByteTokenizer().fingerprint()
    tokens = torch.randint(0, 257, (1, 50))
    assert torch.equal(one.model(tokens, one.model.initial_state(1))[0], two.model(tokens, two.model.initial_state(1))[0])
    with torch.no_grad():
        two.model.memories[0].read.alpha.add_(1e-3)
    save_pretrained(two.model, two.tokenizer, folder)
    assert from_pretrained(folder).fingerprint != one.fingerprint


def test_a_key_that_a_later_version_adds_leaves_the_fingerprints_of_older_models_as_they_are(folder: Path) -> None:
    class Later(ModelConfig):
        added: int = 1

    model = from_pretrained(folder).model
    now = fingerprint(model)
    values = model.config.model_dump()
    model.config = Later.model_validate(values)
    assert fingerprint(model) == now
    model.config = Later.model_validate(values | {"added": 2})
    assert fingerprint(model) != now


def test_whoever_may_read_the_description_may_read_the_weights(tmp_path: Path) -> None:
    """A service is another user than the one who exported the model."""
    before = os.umask(0o022)
    try:
        save_pretrained(PMI(load_model_config("tiny")), ByteTokenizer(), tmp_path / "model")
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in (tmp_path / "model").iterdir()} == {
        "config.json": "0o644", "model.safetensors": "0o644", "tokenizer.json": "0o644",
    }  # fmt: skip


def test_a_folder_that_another_user_may_not_read_is_called_that(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: not str(path).endswith("safetensors"))  # root may read all
    with pytest.raises(UserError, match="may not read it"):
        from_pretrained(folder)


def test_a_tied_table_is_stored_once(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    assert not [name for name in weights if name.startswith("head.")]
    model = from_pretrained(folder).model
    assert model.head.table_0.data_ptr() == model.embedding.table_0.data_ptr()


def test_all_problems_of_a_folder_are_named_at_once(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["norm.bias"]
    weights["norm.weight"] = torch.ones(3)
    weights["extra"] = torch.ones(1)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(UserError) as error:
        from_pretrained(folder)
    text = "\n".join(error.value.problems)
    assert "'norm.bias' is missing" in text
    assert "'norm.weight' is [3], config.json says [64]" in text
    assert "'extra' is not part of this model" in text


@pytest.mark.parametrize("damage", ["missing", "cut", "empty", "json", "format", "config", "tokenizer", "vocabulary"])
def test_a_damaged_folder_is_refused(folder: Path, damage: str) -> None:
    weights, config = folder / "model.safetensors", folder / "config.json"
    if damage == "missing":
        weights.unlink()
    elif damage == "cut":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "empty":
        weights.write_bytes(b"")
    elif damage == "json":
        config.write_text("{")
    elif damage == "tokenizer":
        (folder / "tokenizer.json").write_text('{"kind": "runes"}')
    else:
        content = json.loads(config.read_text())
        if damage == "format":
            content["format"] = 99
        elif damage == "config":
            content["model"]["heads"] = 7
        else:
            content["model"]["vocab_size"] = 300
        config.write_text(json.dumps(content))
    with pytest.raises(UserError, match=str(folder)):
        from_pretrained(folder)


def test_a_configuration_far_beyond_its_weights_is_refused_before_anything_is_allocated(folder: Path) -> None:
    content = json.loads((folder / "config.json").read_text())
    content["model"] |= {"width": 65_536, "feedforward": 1_000_000, "layers": 1024}
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"config.json says"):
        from_pretrained(folder)


def test_a_tokenizer_of_another_size_is_not_saved_with_a_model(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="257 ids, the model 300"):
        save_pretrained(PMI(load_model_config("tiny", ["vocab_size=300"])), ByteTokenizer(), tmp_path)


def test_presets_have_the_sizes_they_promise() -> None:
    assert set(model_presets()) >= {"enwik8", "wikitext103", "pg19", "tiny", "small"}
    with torch.device("meta"):
        count = {name: sum(p.numel() for p in PMI(load_model_config(name)).parameters()) for name in model_presets()}
    assert count["tiny"] < 500_000
    assert 4.5e6 < count["small"] < 6.5e6
    assert 40e6 < count["enwik8"] < 46e6


def test_devices_that_do_not_exist_are_refused_by_name() -> None:
    assert resolve_device("auto").type in ("cpu", "cuda")
    for name in "gpu", "meta", *([] if torch.cuda.is_available() else ["cuda"]):
        with pytest.raises(UserError, match=name):
            resolve_device(name)
