"""`pmi eval --ray`: the documents of a pass spread over the tasks of a Ray cluster, local or remote.

- weights and tokens travel through Ray's object store: workers need the package, not the files
- a task reads a few documents; one that is lost with its worker is submitted again, and said
- a counter with no CPU of its own collects how far the tasks are and each document's outcome as it ends, so that what is done is
  kept whenever the run ends; nothing waits for it, and a task returns its outcomes once more, should the counter be lost
  (a streaming task would not do: Ray refuses it behind ray://)
- metrics come out on Ray's own Prometheus ports as
  ray_pmi_eval_tokens_total, ray_pmi_eval_documents_total, ray_pmi_eval_failures, ray_pmi_eval_tokens_per_second
"""

import os
import socket
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from lm import machine
from lm.config import ModelConfig
from lm.data.lanes import deal
from lm.errors import UserError
from lm.evaluation.corpus import Item
from lm.evaluation.counter import Counter, metrics
from lm.evaluation.job import Job, Pass
from lm.evaluation.stream import Open, StoppedError, Watch, evaluate
from lm.evaluation.tally import Outcome
from lm.evaluation.variants import Mode
from lm.model import PMI

TASKS_PER_WORKER = 4
"""Tasks that each worker gets in turn at most: a lost one costs a quarter of its documents, and the ends come out even."""
SIDE_BY_SIDE = 12
"""Documents that a task has at least, where each worker still gets one: with 6 a step's products are so small that it takes 5 %
longer for the same tokens."""
ATTEMPTS = 4
"""Times that a task may be lost with its worker before the evaluation gives up."""
REPORT_EVERY = 0.5
"""Seconds between a task's reports."""
LAST_WORD = 5.0
"""Seconds that a run which is asked to stop waits for the counter."""


@dataclass(frozen=True)
class Task:
    """What one task reads."""

    key: tuple[str, int]
    """Of the pass, and of the task in it: what the counter knows it by."""
    items: list[Item]
    """Held in memory; with `shuffled` each document is followed by the one whose memory it reads."""
    mode: Mode
    bos: int
    lanes: int | None
    call_tokens: int
    only: set[int]
    """The numbers to report: the others only lend their memory."""


@dataclass
class Cluster:
    """A connection to Ray, and the runner of a job's passes on it."""

    address: str | None = None
    say: Callable[[str], None] = lambda line: None
    failures: int = 0
    workers: int = 0
    owned: bool = field(default=False, init=False)
    counter: Any = field(default=None, init=False)
    """Of all passes: starting its process takes seconds."""

    def __post_init__(self) -> None:
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # a cluster started here works like this process would: Ray's own choice, 15, starves beside anything else that runs
        os.environ.setdefault("RAY_worker_niceness", "0")
        ray = _ray()
        _knock(self.address)
        if not ray.is_initialized():
            quiet = {"log_to_driver": False, "logging_level": "error"}
            local = {"include_dashboard": False} if self.address in (None, "local") else {}
            try:
                ray.init(address=self.address or "local", **quiet, **local)
            except Exception as error:  # Ray raises plain ones where a node of its own does not start
                raise _no_cluster(self.address, error) from error
            self.owned = True
        self.workers = self.workers or max(1, int(ray.cluster_resources().get("CPU", 1)))

    def close(self) -> None:
        """Leave the cluster; one that was started here ends."""
        if self.counter is not None:
            _ray().kill(self.counter)
            self.counter = None
        if self.owned:
            _ray().shutdown()

    def __call__(self, job: Job, model: PMI, part: Pass, watch: Watch, resume: list[Open], finished: set[int]) -> None:
        """Read a pass (`Runner`). Documents in the middle are read anew: their lanes' states stay where they are."""
        ray = _ray()
        if len(part.items) == 1:
            self.say(f"memory {part.name}: one carried stream cannot be split; it runs on one worker")
        name = uuid.uuid4().hex
        tasks = self._tasks(job, name, part, finished)
        parameters = {name: x.detach().cpu() for name, x in model.named_parameters()}
        device = model.device.type  # of a GPU's number each worker sees its own only
        weights = ray.put(Weights(name, model.config, model.dtype, device, parameters))
        counter = self.counter = self.counter or ray.remote(num_cpus=0, max_restarts=-1)(Counter).remote()
        failures = metrics()["failures"]
        submit = ray.remote(num_cpus=1, num_gpus=int(device == "cuda"), max_retries=0)(_read)
        queue = deque((task, 1) for task in tasks)
        waiting: dict[Any, tuple[Task, int]] = {}
        news = _News(ray, counter, name, watch)
        try:
            while waiting or queue:
                failures.set(self.failures)  # on each turn: Ray forgets a gauge that is not set for a while
                if watch.stop():
                    news.last()
                    raise StoppedError([])
                while queue and len(waiting) < self.workers:
                    task, attempt = queue.popleft()
                    waiting[submit.remote(task, weights, counter)] = (task, attempt)
                ready, _ = ray.wait(list(waiting), timeout=REPORT_EVERY)
                news.hear()
                for reference in ready:
                    task, attempt = waiting.pop(reference)
                    try:
                        outcomes = ray.get(reference)
                    except (ray.exceptions.WorkerCrashedError, ray.exceptions.NodeDiedError, ray.exceptions.OutOfMemoryError,
                            ray.exceptions.ObjectLostError, ray.exceptions.LocalRayletDiedError) as error:  # fmt: skip
                        self.failures += 1
                        watch.failed()
                        if attempt == ATTEMPTS:
                            news.last()
                            raise UserError(
                                f"--ray: {task.items[0].name!r} and others were lost with their worker {ATTEMPTS} times "
                                f"({type(error).__name__}); look at the cluster's memory, or use smaller --call-tokens"
                            ) from error
                        task = replace(task, only=task.only - news.done)
                        self.say(f"a worker was lost ({type(error).__name__}); its {len(task.only)} documents are read again")
                        queue.extend([(task, attempt + 1)] if task.only else [])
                        continue
                    for outcome in outcomes:
                        news.take(outcome)
            watch.advanced(news.tokens - news.told)
        finally:
            for reference in waiting:
                ray.cancel(reference, force=True)

    def _tasks(self, job: Job, name: str, part: Pass, finished: set[int]) -> list[Task]:
        left = [place for place, item in enumerate(part.items) if item.number not in finished]
        sizes = np.array([part.items[place].length for place in left], dtype=np.int64)
        count = min(len(left), self.workers * TASKS_PER_WORKER, max(self.workers, len(left) // SIDE_BY_SIDE))
        hands = deal(sizes, np.arange(len(left)), count)
        tasks = []
        for number, hand in enumerate(hands):
            places = [left[i] for i in hand]
            items = [part.items[place].in_memory() for place in places]
            only = {item.number for item in items}
            if part.mode == "shuffled":
                items = [item for place in places for item in _with_donor(part.items, place)]
            options = job.options
            tasks.append(Task((name, number), items, part.mode, job.bos, options.lanes, options.call_tokens, only))
        return sorted(tasks, key=lambda task: -sum(item.length for item in task.items))


class _News:
    """What the driver of a pass has heard from its counter and from its tasks."""

    def __init__(self, ray: Any, counter: Any, name: str, watch: Watch) -> None:
        self.ray, self.counter, self.name, self.watch = ray, counter, name, watch
        self.done: set[int] = set()
        """The documents whose outcome is known."""
        self.tokens = self.told = 0
        """Of those documents; and what the watcher was told of all tasks."""
        self._asked = counter.news.remote(name)

    def take(self, outcome: Outcome) -> None:
        """Hand over an outcome, once."""
        if outcome.number not in self.done:
            self.done.add(outcome.number)
            self.tokens += outcome.tokens
            self.watch.done(outcome)

    def hear(self, wait: float = 0.0) -> None:
        """Take in what the counter has answered, and ask again."""
        if not self.ray.wait([self._asked], timeout=wait)[0]:
            return
        try:
            tokens, ended = self.ray.get(self._asked)
        except self.ray.exceptions.RayActorError:  # progress is no reason to end
            tokens, ended = self.told, []
        self._asked = self.counter.news.remote(self.name)
        for row in ended:
            self.take(Outcome.from_row(row))
        self.watch.advanced(tokens - self.told)
        self.told = tokens

    def last(self) -> None:
        """Take in all that was reported up to now: what was answered may be old."""
        self.hear(LAST_WORD)
        self.hear(LAST_WORD)


def _with_donor(items: Sequence[Item], place: int) -> list[Item]:
    """A document and the one whose memory it reads, numbered apart so that the second is never reported."""
    donor = items[(place + 1) % len(items)].in_memory()
    return [items[place].in_memory(), replace(donor, number=-1 - place)]


@dataclass(frozen=True)
class Weights:
    """A model on its way to the workers."""

    name: str
    """Unique to the pass: a worker builds the model once, whatever the number of its tasks."""
    config: ModelConfig
    dtype: torch.dtype
    device: str
    parameters: dict[str, torch.Tensor]


_built: dict[str, PMI] = {}


def _model(weights: Weights) -> PMI:
    """The model of a pass, built at a worker's first task."""
    if weights.name not in _built:
        _built.clear()
        model = PMI(weights.config).eval()
        if weights.dtype == torch.float64:
            model = model.double()
        elif weights.dtype == torch.bfloat16:
            model = model.compute_in(weights.dtype)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(weights.parameters[name])
        _built[weights.name] = model.to(weights.device)
    return _built[weights.name]


def _read(task: Task, weights: Weights, counter: Any) -> list[Outcome]:
    """A task: read the documents and return their outcomes."""
    machine.keep_pages()
    torch.set_num_threads(1)
    model = _model(weights)
    counted, outcomes, sent = metrics(), list[Outcome](), 0
    began = last = time.monotonic()
    tokens = reported = 0

    def done(outcome: Outcome) -> None:
        outcomes.append(outcome)
        counted["documents"].inc()

    def report() -> None:
        nonlocal reported, sent, last
        last = time.monotonic()
        if tokens > reported:
            counted["tokens"].inc(tokens - reported)
        counted["speed"].set(tokens / max(last - began, 1e-9))
        counter.report.remote(*task.key, tokens, [outcome.row() for outcome in outcomes[sent:]])
        reported, sent = tokens, len(outcomes)

    def advanced(count: int) -> None:
        nonlocal tokens
        tokens += count
        if time.monotonic() - last >= REPORT_EVERY:
            report()

    evaluate(
        model, task.items, task.mode, task.bos, Watch(done, advanced), task.lanes, task.call_tokens,
        finished={item.number for item in task.items} - task.only,
    )  # fmt: skip
    report()
    return outcomes


def _knock(address: str | None) -> None:
    """UserError at once where nothing listens: Ray itself would try for minutes, and then end the process."""
    host, colon, port = (address or "").removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except (OSError, OverflowError) as error:
            raise _no_cluster(address, error) from error


def _no_cluster(address: str | None, error: Exception) -> UserError:
    why = str(error).splitlines()[0] if str(error) else type(error).__name__
    if address in (None, "local"):
        return UserError(
            f"--ray: Ray does not start here ({why}); try again when less runs, or give --ray auto behind `ray start --head`"
        )
    return UserError(
        f"--ray {address}: no Ray cluster answers there ({why}); start one with `ray start --head`, or use --ray local"
    )


def _ray() -> Any:
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UserError("--ray: Ray is not installed; pip install 'pmi-lm[serve]'") from error
    return ray
