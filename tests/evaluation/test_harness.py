"""lm-evaluation-harness with our model: a real run over local task files agrees with `pmi eval`."""

import lzma
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lm.config_files import configs_folder
from lm.errors import UserError
from lm.evaluation.corpus import open_corpus
from lm.evaluation.job import Job, Options
from lm.generation.sampling import Sampling
from lm.generation.stream import stream
from lm.model.pretrained import Checkpoint, from_pretrained

pytest.importorskip("lm_eval", reason="the extra `eval` is not installed")


@pytest.fixture
def excerpt(real_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The beginning of WikiText-2's test file, in the folder where the harness is run."""
    with lzma.open(real_data / "wikitext-2" / "wiki.test.tokens.xz") as file:
        (tmp_path / "wiki.test.tokens").write_bytes(b"".join(file.readlines()[:12]))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return tmp_path / "wiki.test.tokens"


def test_the_harness_gives_our_bits_per_byte_on_wikitext(checkpoint_folder: Path, checkpoint: Checkpoint, excerpt: Path) -> None:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    import lm.evaluation.harness  # noqa: F401, registers the model

    results = simple_evaluate(
        model="pmi", model_args={"pretrained": str(checkpoint_folder)}, tasks=["wikitext2_file"], bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(configs_folder() / "harness"), include_defaults=False),
    )  # fmt: skip
    assert results is not None
    theirs = results["results"]["wikitext2_file"]["bits_per_byte,none"]
    ours = Job(checkpoint, open_corpus(excerpt, "test", checkpoint.tokenizer), Options()).run().figures["on"]
    assert ours.bits_per_byte == pytest.approx(theirs, rel=1e-6)
    assert ours.documents == 1
    assert yaml.safe_load((configs_folder() / "harness" / "wikitext2.yaml").read_text())["task"] == "wikitext2_file"


def requests(kind: str, arguments: list[tuple]) -> list:
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, given, i) for i, given in enumerate(arguments)]  # type: ignore[arg-type]


def test_likelihoods_of_continuations_add_up_to_the_rolling_one(checkpoint_folder: Path, moby_dick: str) -> None:
    from lm.evaluation.harness import PmiLM

    model = PmiLM(str(checkpoint_folder), dtype="float64")
    text = moby_dick[5000:5100]
    cuts = [(text[:i], text[i:]) for i in (0, 1, 8, 40, 99)]
    (whole,) = model.loglikelihood_rolling(requests("loglikelihood_rolling", [(text,)]))
    behind = model.loglikelihood(requests("loglikelihood", cuts))
    before = model.loglikelihood_rolling(requests("loglikelihood_rolling", [(context,) for context, _ in cuts]))
    for (found, _), prefix in zip(behind, before, strict=True):
        assert found + prefix == pytest.approx(whole, rel=1e-9)
    assert math.isclose(before[0], 0.0)


def test_what_greedy_decoding_generates_is_greedy_and_ends_at_the_stop_string(checkpoint_folder: Path) -> None:
    from lm.evaluation.harness import PmiLM

    model = PmiLM(str(checkpoint_folder))
    torch.manual_seed(0)
    text = "".join(stream(from_pretrained(checkpoint_folder), "The whale", 30, Sampling(temperature=0)))
    (generated,) = model.generate_until(requests("generate_until", [("The whale", {"until": [], "max_gen_toks": 30})]))
    assert generated == text
    stop = text[5:7]
    (ended,) = model.generate_until(requests("generate_until", [("The whale", {"until": [stop], "max_gen_toks": 30})]))
    assert ended == text[: text.index(stop)]
    if "\ufffd" not in text:
        assert model.loglikelihood(requests("loglikelihood", [("The whale", text)]))[0][1]


@pytest.mark.parametrize("memory", ["reset", "shuffled", "On", "true", "nonsense", "", 1, None])
def test_a_memory_that_the_harness_model_does_not_know_is_refused(checkpoint_folder: Path, memory: Any) -> None:
    from lm.evaluation.harness import PmiLM

    with pytest.raises(UserError, match=f"memory={memory}: must be one of on, off, True, False"):
        PmiLM(str(checkpoint_folder), memory)
    kept = [PmiLM(str(checkpoint_folder), given).model.config.memory is not None for given in ("on", True, "off", False, "False")]
    assert kept == [True, True, False, False, False]
