"""The whole service in one process, without Ray: what fast tests run, and what shows how the parts fit."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from lm.model.pretrained import Checkpoint, from_pretrained, resolve_device
from serving.api.engines import LocalEngine, ModelInfo, describe
from serving.api.service import Service
from serving.api.turns import Served
from serving.auth import Keys
from serving.config import ServeConfig
from serving.engine import Engine, EngineConfig
from serving.limits import Buckets
from serving.metrics import Metrics, PrometheusSink
from serving.sessions.base import BaseStore
from serving.sessions.opening import open_store
from serving.sessions.store import Limits as StoreLimits


def open_configured_store(config: ServeConfig) -> BaseStore:
    """The store that a configuration names."""
    limits = StoreLimits(config.session_ttl, config.store_bytes, config.response_ttl)
    return open_store(config.store, config.durability, limits)


def make_engine(checkpoint: Checkpoint, config: ServeConfig, store: BaseStore) -> Engine:
    """An engine as a configuration wants it."""
    own = config.engine
    # requests that come together wait a moment before they get the lanes that are free: see LocalEngine
    settings = EngineConfig(own.lanes, own.lanes + own.queue, own.snapshot_segments, own.lease, own.threads, own.dtype)
    return Engine(checkpoint, settings, store)


def load_model(folder: Path, name: str, device: str) -> tuple[Checkpoint, ModelInfo]:
    """A checkpoint on a device, and what the API must know of it."""
    checkpoint = from_pretrained(folder, resolve_device(device, "engine.device"))
    return checkpoint, describe(name, checkpoint, int((folder / "model.safetensors").stat().st_mtime))


@contextmanager
def local_service(config: ServeConfig) -> Iterator[Service]:
    """A service with an engine for each model, all in this process."""
    with ExitStack() as stack:
        store = open_configured_store(config)
        stack.callback(store.close)
        served = []
        for model in config.models:
            if model.use != "retired":
                checkpoint, info = load_model(model.checkpoint, model.called, config.engine.device)
                engine = stack.enter_context(make_engine(checkpoint, config, store))
                served.append(
                    Served(LocalEngine(engine, info, store, config.http.coalesce), checkpoint.tokenizer, model.use == "all")
                )
        keys = None if config.keys is None else Keys(config.keys)
        yield Service(config, store, served, Buckets(), Metrics(PrometheusSink()), keys)
