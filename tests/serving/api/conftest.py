"""The real application over a real engine: in this process behind uvicorn (quick), and on one Ray cluster for the whole run."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from lm.model.pretrained import save_pretrained
from serving.api.app import make_app
from serving.api.local import local_service
from serving.api.service import Service
from serving.config import ServeConfig
from tests.serving.engine.conftest import checkpoint

GREEDY = {"temperature": 0}


@dataclass
class Running:
    """A service that answers."""

    url: str
    service: Service

    def http(self, **more: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=120, **more)

    def client(self, **more: Any) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **more})


def read_events(response: httpx.Response) -> Iterator[tuple[str, dict[str, Any]]]:
    """Id and data of each event."""
    id = ""
    for line in response.iter_lines():
        if line.startswith("id: "):
            id = line[4:]
        elif line.startswith("data: ") and line != "data: [DONE]":
            yield id, json.loads(line[6:])
            id = ""


@contextmanager
def listening(app: Any) -> Iterator[str]:
    """The address of an application behind uvicorn."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model on disk."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    found = checkpoint()
    save_pretrained(found.model, found.tokenizer, path)
    return path


@pytest.fixture(scope="session")
def other_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one: other weights, the same tokenizer."""
    path = tmp_path_factory.mktemp("models") / "other"
    found = checkpoint(seed=1)
    save_pretrained(found.model, found.tokenizer, path)
    return path


Serve = Callable[..., Running]


@pytest.fixture
def serve(folder: Path, tmp_path: Path) -> Iterator[Serve]:
    """Starts services in this process."""
    with ExitStack() as stack:

        def start(**changes: Any) -> Running:
            values = {"models": [{"checkpoint": str(folder)}], "store": f"sqlite:///{tmp_path}/sessions.db"}
            values |= {"engine": {"lanes": 4, "queue": 8, "threads": None, "lease": 1.0}} | changes
            service = stack.enter_context(local_service(ServeConfig.model_validate(values)))
            return Running(stack.enter_context(listening(make_app(service))), service)

        yield start


@pytest.fixture
def running(serve: Serve) -> Running:
    return serve()
