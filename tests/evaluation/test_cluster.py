"""`pmi eval --ray` on a real cluster: the same figures, and documents survive the loss of their worker."""

import contextlib
import io
import json
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import typer
from rich.console import Console

from lm.evaluation import cluster as cluster_module
from lm.evaluation import progress
from lm.evaluation.cluster import Cluster
from lm.evaluation.corpus import open_corpus
from lm.evaluation.job import Job, Listener, Options, Result
from lm.model.pretrained import Checkpoint
from tests.conftest import Pmi

TASK = "ray::_read"
"""What Ray calls the process of one of our tasks."""


def evaluate(checkpoint: Checkpoint, books: Path, cluster: Cluster | None = None, listener: Listener | None = None) -> Result:
    corpus = open_corpus(books, "test", checkpoint.tokenizer)
    job = Job(checkpoint, corpus, Options(["on", "shuffled"], call_tokens=64, dtype="float64"))
    return job.run(listener) if cluster is None else job.run(listener, cluster)


def test_a_cluster_gives_the_figures_of_one_process(checkpoint: Checkpoint, books: Path, ray_cluster: int) -> None:
    alone, together = evaluate(checkpoint, books), evaluate(checkpoint, books, Cluster())
    for name, figures in alone.figures.items():
        assert together.figures[name].tokens == figures.tokens
        assert together.figures[name].nats == pytest.approx(figures.nats, rel=1e-9)
        mine, theirs = together.figures[name].interval, figures.interval
        assert mine is not None
        assert theirs is not None
        assert (mine.low, mine.high) == pytest.approx((theirs.low, theirs.high), rel=1e-9)
    assert together.leak_alarm.quiet
    deadline, wanted = (
        time.monotonic() + 20,
        {f"ray_pmi_eval_{name}" for name in ("tokens_total", "documents_total", "failures", "tokens_per_second")},
    )
    missing = wanted
    while missing and time.monotonic() < deadline:
        scraped = urllib.request.urlopen(f"http://127.0.0.1:{ray_cluster}/metrics", timeout=5).read().decode()
        missing = {name for name in wanted if f"{name}{{" not in scraped}
        time.sleep(0.5)
    assert not missing


def test_the_gauge_of_failures_is_set_all_through_a_run(
    checkpoint: Checkpoint, books: Path, ray_cluster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values: list[float] = []
    monkeypatch.setattr(cluster_module, "metrics", lambda: {"failures": SimpleNamespace(set=values.append)})
    monkeypatch.setattr(cluster_module, "REPORT_EVERY", 0.05)
    began = time.monotonic()
    evaluate(checkpoint, books, Cluster())
    assert values == [0] * len(values)
    assert len(values) > 3  # the passes are two, and each has four tasks or more on two workers
    assert len(values) < 100 + 20 * (time.monotonic() - began), "the loop waits"


def test_an_interrupted_run_keeps_each_document_that_ended_and_says_how_many(
    checkpoint: Checkpoint, tmp_path: Path, moby_dick: str, ray_cluster: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "books").mkdir()
    for number, length in enumerate((40_000, 400, 500, 600)):
        (tmp_path / "books" / f"{number}.txt").write_text(moby_dick[:length])
    corpus = open_corpus(tmp_path / "books", "test", checkpoint.tokenizer)
    options = Options(["on"], lanes=2, call_tokens=32, out=tmp_path / "e")
    journal = tmp_path / "e" / "journal.jsonl"

    class Requested:  # Ctrl-C as soon as something is kept
        signal = property(lambda self: 2 if journal.exists() else 0)
        close = staticmethod(lambda: None)

    monkeypatch.setattr(progress, "StopRequest", Requested)
    monkeypatch.setattr(cluster_module, "TASKS_PER_WORKER", 1)
    said = io.StringIO()
    with pytest.raises(typer.Exit) as ended:  # all of the documents are one task's
        progress.follow(Job(checkpoint, corpus, options), Console(file=said), None, Cluster(workers=1))
    assert ended.value.exit_code == 130
    kept = journal.read_text().count("\n")
    assert 1 <= kept <= 3
    assert f": {kept} of 4 documents; to go on" in said.getvalue().replace("\n", " ")
    found = Job(checkpoint, corpus, options).journal.outcomes["on"]
    assert len(found) == kept
    alone = Job(checkpoint, open_corpus(tmp_path / "books", "test", checkpoint.tokenizer, ["1", "2", "3"]), Options())
    alone.run()
    nats = {outcome.name: outcome.nats for outcome in alone.outcomes("on")}
    assert {x.name: x.nats for x in found.values()} == {x.name: pytest.approx(nats[x.name], rel=1e-5) for x in found.values()}


def test_the_command_line_reads_on_a_cluster(pmi: Pmi, checkpoint_folder: Path, books: Path, ray_cluster: int) -> None:
    call = ("eval", "--checkpoint", checkpoint_folder, "--data", books, "--json")
    (code, alone, err), (ray_code, together, ray_err) = pmi(*call), pmi(*call, "--ray", "--workers", 2)
    assert (code, ray_code) == (0, 0), err + ray_err
    nats = [json.loads(out)["passes"]["on"]["nats"] for out in (alone, together)]
    assert nats[0] == pytest.approx(nats[1], rel=1e-5)
    code, _, err = pmi(*call, "--ray", "local", "--documents", "book5")
    assert code == 0
    assert "one carried stream cannot be split" in err


def test_documents_lost_with_a_killed_worker_are_read_again(
    checkpoint: Checkpoint, tmp_path: Path, moby_dick: str, ray_cluster: int
) -> None:
    for number in range(4):
        (tmp_path / f"{number}.txt").write_text(moby_dick[number * 10_000 : (number + 1) * 10_000])
    lines: list[str] = []
    cluster = Cluster(say=lines.append)
    killed: list[int] = []

    def kill() -> None:  # the first process that runs a task, with -9, in the middle of it
        deadline = time.monotonic() + 60
        while not killed and time.monotonic() < deadline:
            for process in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it may end while it is looked at
                    if not killed and TASK in process.name() + "".join(process.cmdline()):
                        os.kill(process.pid, signal.SIGKILL)
                        killed.append(process.pid)
            time.sleep(0.02)

    corpus = open_corpus(tmp_path, "test", checkpoint.tokenizer)
    job = Job(checkpoint, corpus, Options(["on"], call_tokens=64))
    thread = threading.Thread(target=kill)
    thread.start()
    failed: list[int] = []
    result = job.run(Listener(failed=lambda: failed.append(1)), cluster)
    thread.join()
    assert killed
    assert cluster.failures == len(failed) >= 1
    assert any("a worker was lost" in line for line in lines)
    assert result.figures["on"].tokens == corpus.tokens
    alone = Job(checkpoint, corpus, Options(["on"])).run()
    assert result.figures["on"].nats == pytest.approx(alone.figures["on"].nats, rel=1e-4)
