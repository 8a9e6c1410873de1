"""`pmi eval --ray` on a real cluster: the same figures, and documents survive the loss of their worker."""

import contextlib
import os
import signal
import threading
import time
import urllib.request
from pathlib import Path

import psutil
import pytest

from lm.evaluation.cluster import Cluster
from lm.evaluation.corpus import open_corpus
from lm.evaluation.job import Job, Listener, Options, Result
from lm.model.pretrained import Checkpoint

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
        {"ray_pmi_eval_tokens_total", "ray_pmi_eval_documents_total", "ray_pmi_eval_failures"},
    )
    missing = wanted
    while missing and time.monotonic() < deadline:
        scraped = urllib.request.urlopen(f"http://127.0.0.1:{ray_cluster}/metrics", timeout=5).read().decode()
        missing = {name for name in wanted if f"{name}{{" not in scraped}
        time.sleep(0.5)
    assert not missing


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
