"""`pmi eval` as a user meets it: figures with their protocol, interrupted runs, and input that makes a figure doubtful."""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from lm.data.tokenizer import ByteTokenizer
from lm.data.words import WordTokenizer
from lm.evaluation import alarm, journal
from lm.evaluation.corpus import open_corpus
from lm.evaluation.figures import RESAMPLES, difference, figures, interval
from lm.evaluation.job import Job, Listener, Options
from lm.evaluation.stream import Batch
from lm.evaluation.tally import Outcome, Tally
from lm.evaluation.variants import Mode
from lm.model import PMI
from lm.model.pretrained import Checkpoint, save_pretrained
from lm.model.state import State, where_lanes
from tests.conftest import Pmi
from tests.evaluation.conftest import ROOT, make_model, result_of

PUT = Batch.put


def test_the_report_names_every_figure_with_its_protocol(pmi: Pmi, checkpoint_folder: Path, books: Path, tmp_path: Path) -> None:
    code, out, err = pmi("eval", "--checkpoint", checkpoint_folder, "--data", books, "--by-position", "--out", tmp_path / "e")
    assert code == 0, err
    result = result_of(tmp_path / "e")
    tokens = sum(path.stat().st_size for path in books.iterdir())
    for name in ("on", "off", "reset", "shuffled"):
        found = result["passes"][name]
        assert found["tokens"] == tokens
        assert found["documents"] == 7
        assert found["bits_per_byte"] == pytest.approx(found["nats"] / tokens / math.log(2))
        assert found["perplexity"] == pytest.approx(math.exp(found["nats"] / tokens))
        assert sum(bin_["tokens"] for bin_ in found["by_position"]) == tokens
        assert found["interval"]["low"] < found["nats_per_token"] < found["interval"]["high"]
    assert len({result["passes"][name]["nats"] for name in ("on", "off", "reset", "shuffled")}) == 4
    assert result["leak_alarm"]["quiet"]
    assert result["leak_alarm"]["across"] == 21
    assert set(result["differences"]) == {"off", "reset", "shuffled"}
    gap = (result["passes"]["reset"]["nats"] - result["passes"]["on"]["nats"]) / tokens
    assert result["differences"]["reset"]["nats_per_token"] == pytest.approx(gap)
    assert result["protocol"]["comparable"] is False
    for said in ("T=8, W=8", "position 0 (BOS) never", "not comparable with published figures", "one token", "leak alarm quiet"):
        assert said in out
    assert (tmp_path / "e" / "by-position.png").read_bytes()[:4] == b"\x89PNG"


def test_memory_off_is_memory_on_of_which_nothing_is_read(checkpoint: Checkpoint, books: Path) -> None:
    corpus = open_corpus(books, "test", checkpoint.tokenizer)
    options = Options(["on", "off"], dtype="float64")
    found = Job(checkpoint, corpus, options).run().figures
    assert abs(found["on"].nats - found["off"].nats) > 1
    zeroed = 0
    with torch.no_grad():
        for name, parameter in checkpoint.model.named_parameters():
            if ".read.out" in name:
                parameter.zero_()
                zeroed += 1
    assert zeroed
    assert Job(checkpoint, corpus, replace(options, modes=["on"])).run().figures["on"].nats == pytest.approx(found["off"].nats)


def test_another_segment_and_window_are_the_same_weights_read_otherwise(pmi: Pmi, checkpoint_folder: Path, books: Path) -> None:
    call = ("eval", "--checkpoint", checkpoint_folder, "--data", books, "--json")
    plain, long = json.loads(pmi(*call)[1]), json.loads(pmi(*call, "--segment", 16, "--window", 4)[1])
    assert long["protocol"]["segment"] == 16
    assert long["protocol"]["trained_with"] == {"segment": 8, "window": 8}
    assert long["passes"]["on"]["tokens"] == plain["passes"]["on"]["tokens"]
    assert long["passes"]["on"]["nats"] != plain["passes"]["on"]["nats"]


def test_one_document_is_shuffled_in_parts_against_carried_memory_in_the_same_parts(
    pmi: Pmi, checkpoint_folder: Path, tmp_path: Path, moby_dick: str
) -> None:
    (tmp_path / "one.txt").write_text(moby_dick[:1100])
    call = ("eval", "--checkpoint", checkpoint_folder, "--data", tmp_path / "one.txt", "--json")
    result = json.loads(pmi(*call, "--memory", "shuffled")[1])
    assert set(result["passes"]) == {"on, 64 parts", "shuffled, 64 parts"}
    assert {found["tokens"] for found in result["passes"].values()} == {len(moby_dick[:1100].encode())}
    assert result["differences"]["shuffled, 64 parts"]["units"] == 64
    assert result["differences"]["shuffled, 64 parts"]["over"] == "parts"
    for found in result["passes"].values():
        assert (found["documents"], found["interval"]["units"], found["interval"]["over"]) == (1, 64, "parts")
    assert json.loads(pmi(*call)[1])["passes"]["on"]["interval"]["over"] == "blocks"
    said = pmi(*call[:-1], "--memory", "on,shuffled")[1]
    for line in ("bootstrap over 100 blocks", "bootstrap over 64 parts", "each part reads the memory of the next one"):
        assert line in said
    assert "64 documents" not in said


def test_a_single_segment_has_no_interval_and_the_report_says_why(pmi: Pmi, checkpoint_folder: Path, books: Path) -> None:
    call = ("eval", "--checkpoint", checkpoint_folder, "--data", books, "--documents", "book2", "--memory", "on,off")
    code, out, err = pmi(*call)
    assert code == 0, err
    assert out.count("no 95 % interval: the one document, of 8 tokens, is no longer than a segment of 8: ") == 1
    assert "nats/token (no interval: nothing to resample), not surely different" in out
    assert "no 95 % interval" in " ".join(json.loads(pmi(*call, "--json")[1])["notes"])
    assert "no 95 % interval" not in pmi(*call[:5], "--documents", "book3")[1]


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_evaluation_goes_on_where_it_was(
    pmi: Pmi, checkpoint_folder: Path, tmp_path: Path, moby_dick: str, how: signal.Signals
) -> None:
    (tmp_path / "books").mkdir()
    for number, length in enumerate((12_000, 400, 500, 600)):
        (tmp_path / "books" / f"{number}.txt").write_text(moby_dick[:length])
    call = ["eval", "--checkpoint", str(checkpoint_folder), "--data", str(tmp_path / "books"), "--out", str(tmp_path / "e")]
    slowly = ["--call-tokens", "32", "--lanes", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "lm", *call, *slowly],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60
    journal = tmp_path / "e" / "journal.jsonl"
    while time.monotonic() < deadline and not (journal.exists() and journal.read_text().count("\n") >= 2):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(how)
    _, err = process.communicate(timeout=300)
    assert process.returncode == (130 if how == signal.SIGINT else -signal.SIGKILL)
    if how == signal.SIGINT:
        assert b"to go on, run the same command again" in err
    with journal.open("a") as file:
        file.write('{"pass": "on", "sec')  # a line that a crash cut short
    before = [json.loads(line) for line in journal.read_text().splitlines()[:-1]]
    if how == signal.SIGINT:
        ended = sum(row["outcome"] is not None for row in before)
        middle = len(list((tmp_path / "e" / "open").iterdir()))
        assert f"{ended} of 4 documents, {middle} more in the middle; to go on".encode() in b" ".join(err.split())
    code, _, err2 = pmi(*call)
    assert code == 0, err2
    assert "tokens were read before" in err2
    read_before = int(err2.split("memory on: ")[1].split(" of")[0].replace(",", ""))
    # the long document is kept in the middle where there was time to save it
    assert (read_before > 2000) == (how == signal.SIGINT)
    rows = [json.loads(line) for line in journal.read_text().splitlines()]
    assert rows[: len(before)] == before
    assert sorted(row["outcome"]["number"] for row in rows if row["outcome"]) == [0, 1, 2, 3]
    assert (None in [row["outcome"] for row in rows]) == (how == signal.SIGINT), "the time of what was in the middle counts"
    assert result_of(tmp_path / "e")["passes"]["on"]["seconds"] == pytest.approx(sum(row["seconds"] for row in rows))
    code, out, _ = pmi("eval", "--checkpoint", checkpoint_folder, "--data", tmp_path / "books", "--json")
    assert result_of(tmp_path / "e")["passes"]["on"]["nats"] == pytest.approx(json.loads(out)["passes"]["on"]["nats"], rel=1e-6)
    code, _, err3 = pmi(*call, "--memory", "off", "--segment", 16)
    assert code == 2
    assert "holds another evaluation (it differs in segment)" in err3


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_a_document_in_the_middle_is_saved_while_it_is_read_and_goes_on_from_there(
    checkpoint: Checkpoint, tmp_path: Path, moby_dick: str, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    (tmp_path / "one.txt").write_text(moby_dick[:2_000])
    corpus = open_corpus(tmp_path / "one.txt", "test", checkpoint.tokenizer)
    options = Options(dtype=dtype, call_tokens=64, out=tmp_path / "e")
    read: list[int] = []

    def dying(tokens: int) -> None:
        read.append(tokens)
        if sum(read) > 1_000:
            raise KeyboardInterrupt  # as good as kill -9: nothing is saved on the way out

    with pytest.raises(KeyboardInterrupt):
        Job(checkpoint, corpus, replace(options, out=tmp_path / "later")).run(Listener(advanced=dying))
    assert not (tmp_path / "later" / "open").exists(), "it was not yet time"
    read.clear()
    monkeypatch.setattr(journal, "SAVE_EVERY", 0.0)
    with pytest.raises(KeyboardInterrupt):
        Job(checkpoint, corpus, options).run(Listener(advanced=dying))
    monkeypatch.undo()
    before: list[int] = []
    result = Job(checkpoint, corpus, options).run(Listener(started=lambda part, tokens: before.append(tokens)))
    assert before == [sum(read[:-1])]
    whole = Job(checkpoint, corpus, replace(options, out=None)).run()
    assert result.figures["on"].nats == pytest.approx(whole.figures["on"].nats, rel=1e-9)


def unmarked(self: Batch, row: int, at: int, tally: Tally, first: int, segments: int) -> None:
    """`Batch.put`, but documents start unnoticed: each goes on with the memory and the window of the one before."""
    PUT(self, row, at, tally, first, segments)
    self.starts[row, at] = False


@pytest.mark.parametrize("modes", [["on"], ["on", "reset"]])
def test_the_leak_alarm_rings_when_the_run_carries_anything_from_document_to_document(
    checkpoint: Checkpoint, books: Path, monkeypatch: pytest.MonkeyPatch, modes: list[Mode]
) -> None:
    corpus = open_corpus(books, "test", checkpoint.tokenizer)
    quiet = Job(checkpoint, corpus, Options(modes)).run().leak_alarm
    assert (quiet.quiet, quiet.documents, quiet.across) == (True, 7, 7 * len(modes))
    # only while the run reads: the alarm's own reading is sound, and must hear of it from the run's figures
    job = Job(checkpoint, corpus, Options(modes, lanes=1))
    with monkeypatch.context() as patch:
        patch.setattr(Batch, "put", unmarked)
        assert not job.run().leak_alarm.quiet
    outcomes = {mode: job.outcomes(mode) for mode in modes}
    rung = alarm.check(job.model, corpus.items, job.bos, outcomes)
    assert [leak for leak in rung.leaks if "in this run" in leak]


def test_the_leak_alarm_rings_for_a_window_that_all_modes_carry(
    checkpoint: Checkpoint, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = open_corpus(books, "test", checkpoint.tokenizer)
    forward = PMI.forward

    def carrying(self: PMI, tokens: Tensor, state: State, **how: Any) -> tuple[Tensor, State]:
        """The memory starts anew with a document, the window does not."""
        starts = how.get("starts")
        if starts is None:
            return forward(self, tokens, state, **how)
        memories = where_lanes(starts[:, 0], self.initial_memory(state.lanes), state.memories)
        return forward(self, tokens, state._replace(memories=memories), **{**how, "starts": torch.zeros_like(starts)})

    monkeypatch.setattr(PMI, "forward", carrying)
    rung = alarm.check(checkpoint.model, corpus.items, checkpoint.tokenizer.bos, {})
    assert [leak for leak in rung.leaks if "alone" in leak]
    assert not [leak for leak in rung.leaks if "between the memory modes" in leak]


def test_the_alarm_ends_the_command_with_a_failure(
    pmi: Pmi, checkpoint_folder: Path, books: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alarm, "check", lambda *args: alarm.Alarm(1, 0, ["book0.txt: a leak"]))
    code, out, err = pmi("eval", "--checkpoint", checkpoint_folder, "--data", books)
    assert code == 1
    assert "LEAK ALARM: book0.txt: a leak" in out
    assert "LEAK ALARM" in err


def test_progress_can_be_scraped_by_prometheus_while_it_runs(pmi: Pmi, checkpoint_folder: Path, books: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pages: list[str] = []
    stop = threading.Event()

    def scrape() -> None:
        while not stop.wait(0.1):
            with contextlib.suppress(OSError):
                pages.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5).read().decode())

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        code, _, err = pmi("eval", "--checkpoint", checkpoint_folder, "--data", books, "--metrics-port", port, "--call-tokens", 8)
    finally:
        stop.set()
        thread.join()
    assert code == 0, err
    for name in ("pmi_eval_tokens_total", "pmi_eval_documents_total", "pmi_eval_failures_total", "pmi_eval_tokens_per_second"):
        assert f"{name} " in pages[-1]
    assert float(pages[-1].split("\npmi_eval_tokens_total ")[1].split()[0]) > 0


def outcome(number: int, tokens: int, nats: float) -> Outcome:
    return Outcome(number, str(number), tokens, tokens // 5, tokens, nats, 0.0, [], [(tokens, nats)])


def test_confidence_is_resampled_over_documents_and_its_width_is_that_of_theory() -> None:
    generator = np.random.default_rng(0)
    losses = generator.normal(2.0, 0.1, 400)
    found = interval([outcome(i, 100, 100 * float(x)) for i, x in enumerate(losses)])
    assert found is not None
    assert found.over == "documents"
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * 0.1 / math.sqrt(400), rel=0.15)
    assert RESAMPLES >= 1000
    assert interval([outcome(0, 100, 200.0)]) is None


def test_figures_are_ratios_of_sums_never_means_of_means() -> None:
    found = figures([outcome(0, 10, 10.0), outcome(1, 990, 3 * 990.0)], characters=2000, seconds=2.0)
    assert found.nats_per_token == pytest.approx((10 + 3 * 990) / 1000)
    assert found.word_perplexity == pytest.approx(math.exp(2980 / 200))
    assert found.bits_per_character == pytest.approx(2980 / 2000 / math.log(2))
    assert found.tokens_per_second == 500


def test_shuffling_is_called_worse_only_when_it_surely_is() -> None:
    generator = np.random.default_rng(1)
    on = [outcome(i, 100, 200 + float(x)) for i, x in enumerate(generator.normal(0, 20, 60))]
    worse = [outcome(x.number, 100, x.nats + 1 + float(generator.normal(0, 0.5))) for x in on]
    noise = [outcome(x.number, 100, x.nats + float(generator.normal(0, 0.5))) for x in on]
    assert difference(worse, on).worse is True
    assert difference(on, worse).worse is False
    assert difference(noise, on).worse is None


def test_partial_data_is_never_called_comparable_and_says_its_unknown_rate(pmi: Pmi, tmp_path: Path) -> None:
    lines = [" \n = An article = \n", " \n the whale is a whale <unk> \n", " the sea is the sea \n"] * 4
    for name in ("train", "valid", "test"):
        (tmp_path / f"wiki.{name}.tokens").write_text("".join(lines) + (" leviathan \n" if name == "test" else ""))
    assert pmi("data", "prepare", "wikitext2", "--source", tmp_path, "--out", tmp_path / "data")[0] == 0
    from lm.data.prepared import open_prepared

    data = open_prepared(tmp_path / "data")
    assert isinstance(data.tokenizer, WordTokenizer)
    save_pretrained(make_model(f"vocab_size={data.tokenizer.vocab_size}"), data.tokenizer, tmp_path / "model")
    code, out, err = pmi("eval", "--checkpoint", tmp_path / "model", "--data", tmp_path / "data", "--out", tmp_path / "e")
    assert code == 0, err
    result = result_of(tmp_path / "e")
    assert result["protocol"]["comparable"] is False
    assert result["protocol"]["unknown_rate"] == pytest.approx(5 / result["protocol"]["tokens"])
    assert result["passes"]["on"]["word_perplexity"] == pytest.approx(result["passes"]["on"]["perplexity"])
    assert "NOT comparable" in out
    assert "unknown tokens:" in out
    # what the whole of a public data set leaves in its manifest
    manifest = json.loads((tmp_path / "data" / "manifest.json").read_text())
    assert manifest["partial"] is True
    (tmp_path / "data" / "manifest.json").write_text(json.dumps({**manifest, "partial": False, "differences": []}))
    code, out, err = pmi("eval", "--checkpoint", tmp_path / "model", "--data", tmp_path / "data", "--out", tmp_path / "whole")
    assert code == 0, err
    assert result_of(tmp_path / "whole")["protocol"]["comparable"] is True
    assert "comparable with published" not in out
    # the same text in articles: as many tokens, in more documents
    assert pmi("data", "prepare", "wikitext2", "--source", tmp_path, "--articles", "--out", tmp_path / "articles")[0] == 0
    code, out, err = pmi("eval", "--checkpoint", tmp_path / "model", "--data", tmp_path / "articles", "--json")
    assert json.loads(out)["protocol"]["tokens"] == result["protocol"]["tokens"]


def test_whatever_makes_a_figure_doubtful_is_an_error_that_says_what_to_do(
    pmi: Pmi, checkpoint_folder: Path, books: Path, tmp_path: Path
) -> None:
    def refused(*arguments: object, checkpoint: Path = checkpoint_folder) -> str:
        code, _, err = pmi("eval", "--checkpoint", checkpoint, *arguments)
        assert code == 2, err
        assert "Traceback" not in err
        return " ".join(err.split())

    (tmp_path / "empty.txt").touch()
    assert "no text there" in refused("--data", tmp_path / "empty.txt")
    assert "there is no such file or folder" in refused("--data", tmp_path / "nowhere")
    assert "no model there" in refused("--data", books, checkpoint=books).replace("no config.json there", "no model there")
    several = refused("--data", books, "--memory", "sometimes", "--by-position", "--device", "tpu")
    assert "must be of on, off, reset, shuffled" in several
    assert "name a folder for it with --out" in several
    assert "tpu" in several
    assert "'book9': not in" in refused("--data", books, "--documents", "book1,book9")
    assert "names none" in refused("--data", books, "--documents", " ,")
    assert "--segment 0: must be 1 to 8,192" in refused("--data", books, "--segment", 0)
    assert "shuffling needs two documents" in refused("--data", books, "--documents", "book2", "--memory", "shuffled")
    assert "holds other files" in refused("--data", books, "--out", books)
    assert "no Ray cluster answers there" in refused("--data", books, "--ray", "127.0.0.1:1")
    save_pretrained(make_model("memory=off"), ByteTokenizer(), tmp_path / "off")
    assert "trained without memory" in refused("--data", books, "--memory", "reset", checkpoint=tmp_path / "off")
    weights = load_file(checkpoint_folder / "model.safetensors")
    broken = tmp_path / "broken"
    save_pretrained(make_model(), ByteTokenizer(), broken)
    save_file({**weights, "norm.weight": weights["norm.weight"] * torch.nan}, broken / "model.safetensors")
    assert "not numbers any more" in refused("--data", books, checkpoint=broken)


def test_prepared_data_of_another_tokenizer_or_with_a_missing_or_changed_shard_is_refused(
    pmi: Pmi, checkpoint_folder: Path, books: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    options = ("--tokenizer", "bytes", "--split", "test", "--out")
    assert pmi("data", "prepare", "text", "--source", books, *options, data)[0] == 0
    call = ("eval", "--checkpoint", checkpoint_folder, "--data", data)
    assert pmi(*call)[0] == 0
    code, _, err = pmi(*call, "--split", "validation")
    assert (code, "no split 'validation'" in err) == (2, True)
    words = WordTokenizer.build(["a b c <unk>\n"])
    save_pretrained(make_model(f"vocab_size={words.vocab_size}"), words, tmp_path / "words")
    code, _, err = pmi("eval", "--checkpoint", tmp_path / "words", "--data", data)
    assert (code, "made with tokenizer" in err) == (2, True)
    index = data / "test.index.npy"
    rows = np.load(index)
    whole = index.read_bytes()
    np.save(index, np.concatenate([rows[:1] // 2, rows[1:]]))
    code, _, err = pmi(*call)
    assert (code, "test.index.npy: its checksum is not the manifest's" in err) == (2, True)
    index.write_bytes(whole)
    shard = data / "test-00000.bin"
    whole = shard.read_bytes()
    shard.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    code, _, err = pmi(*call)
    assert (code, "its checksum is not the manifest's" in err) == (2, True)
    shard.unlink()
    code, _, err = pmi(*call)
    assert (code, "missing, the manifest names it" in err) == (2, True)


def test_two_models_are_compared_document_by_document(pmi: Pmi, checkpoint_folder: Path, books: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    torch.manual_seed(7)
    save_pretrained(PMI(make_model().config), ByteTokenizer(), other)
    for folder, name in ((checkpoint_folder, "a"), (other, "b")):
        code, _, err = pmi("eval", "--checkpoint", folder, "--data", books, "--out", tmp_path / name)
        assert code == 0, err
    code, out, err = pmi("eval-compare", tmp_path / "a", tmp_path / "b", "--json")
    assert code == 0, err
    found = json.loads(out)
    a, b = (result_of(tmp_path / name)["passes"]["on"]["nats_per_token"] for name in ("a", "b"))
    gap = found["difference"]
    assert gap["nats_per_token"] == pytest.approx(a - b, abs=1e-12)
    assert gap["low"] < a - b < gap["high"]
    assert gap["units"] == 7
    code, out, _ = pmi("eval-compare", tmp_path / "a", tmp_path / "a")
    assert code == 0
    assert "+0.00000 nats/token" in out
    assert "not surely different" in out


def test_evaluations_of_other_documents_are_not_compared(pmi: Pmi, checkpoint_folder: Path, books: Path, tmp_path: Path) -> None:
    some = ",".join(sorted(path.stem for path in books.iterdir())[:3])
    for name, options in (("all", []), ("some", ["--documents", some])):
        code, _, err = pmi("eval", "--checkpoint", checkpoint_folder, "--data", books, *options, "--out", tmp_path / name)
        assert code == 0, err
    code, _, err = pmi("eval-compare", tmp_path / "all", tmp_path / "some")
    assert code == 2
    assert "different documents" in err
    code, _, err = pmi("eval-compare", tmp_path / "all", tmp_path / "all", "--memory", "on,reset")
    assert code == 2
    assert "no pass 'reset', only on" in err
    code, _, err = pmi("eval-compare", tmp_path / "all", tmp_path)
    assert code == 2
    assert "is no folder of `pmi eval --out`" in err


def test_the_alarm_is_quiet_where_a_first_segment_is_a_single_token(pmi: Pmi, tmp_path: Path) -> None:
    """Scores of one row are summed otherwise than those of two: the company that a document is read in must not show."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for number, size in enumerate((1, 1, 300)):
        (texts / f"{number}.txt").write_text("z" * size)
    for seed in range(8):
        torch.manual_seed(seed)
        save_pretrained(PMI(make_model().config), ByteTokenizer(), tmp_path / f"model{seed}")
        code, _, err = pmi("eval", "--checkpoint", tmp_path / f"model{seed}", "--data", texts, "--memory", "on,reset")
        assert code == 0, err
