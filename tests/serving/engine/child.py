"""A process with an engine that is going to be killed: generates for several sessions and writes down what it receives.

python -m tests.serving.engine.child MODEL STORE RECEIVED      (each line on stdin starts one such process; its pid, then its end)
"""

import os
import sys
import threading
import time
from pathlib import Path

import torch

from lm.generation.sampling import Sampling
from lm.model.pretrained import Checkpoint, from_pretrained
from serving.engine import Engine, EngineConfig, Request, journal
from serving.sessions.errors import BusyError, StaleError, UnavailableError
from serving.sessions.opening import open_store
from serving.sessions.store import LOCAL, SessionStore

TOKENS = 60
PROMPTS = {"a": b"x", "b": b"a longer prompt, beyond a segment", "c": b"", "d": b"12345678"}
LEASE = 0.4


def nursery(folder: Path, url: str, received: Path) -> None:
    """Fork workers on demand, with everything imported and loaded: what would take seconds in each."""
    torch.set_num_threads(1)
    journal.PACE = 0.002  # a transaction for every step
    checkpoint = from_pretrained(folder)
    open_store(url).close()
    for _ in sys.stdin:
        pid = os.fork()
        if not pid:
            try:
                work(checkpoint, url, received)
            finally:
                os._exit(0)
        print(pid, flush=True)
        os.waitpid(pid, 0)
        print("ended", flush=True)


def work(checkpoint: Checkpoint, url: str, received: Path) -> None:
    """Bring every session to TOKENS generated tokens; each event received is one line `session position id...`."""
    store = open_store(url)
    log = os.open(received, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with Engine(checkpoint, EngineConfig(lanes=4, snapshot_segments=1, lease=LEASE), store) as engine:
        threads = [threading.Thread(target=_session, args=(engine, store, name, log)) for name in PROMPTS]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    store.close()


def _session(engine: Engine, store: SessionStore, name: str, log: int) -> None:
    prompt, end = list(PROMPTS[name]), 1 + len(PROMPTS[name]) + TOKENS
    while True:
        try:
            position = store.get(LOCAL, name).position
            if position >= end:
                return
            # a prompt that was cut off in the middle is completed first
            missing = prompt[max(0, position - 1) :]
            tokens = end - max(position, 1 + len(prompt))
            request = Request(missing, tokens, Sampling(temperature=0), session=name)
            for event in engine.submit(request):
                os.write(log, f"{name} {event.position} {' '.join(map(str, event.ids))}\n".encode())
            return
        except (BusyError, StaleError, UnavailableError):
            time.sleep(0.02)


if __name__ == "__main__":
    nursery(Path(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
