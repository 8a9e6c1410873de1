"""The service on Ray Serve: ingress replicas that speak HTTP -> engine replicas, one engine loop each -> the session store.

A session's requests go to the same engine replica while it lives (consistent hashing); that is a cache hint only. What keeps a
session whole is the store: versions, leases and fences. A `Keeper` counts limits for all ingresses and keeps the store tidy.
"""

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Awaitable
from typing import Any

import grpc
import ray
import torch
from ray import serve
from ray.exceptions import RayActorError, RayError, TaskCancelledError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle

from lm.data.tokenizer import load_tokenizer
from lm.errors import UserError
from serving.api.app import make_app
from serving.api.engines import Chunk, LocalEngine, ModelInfo
from serving.api.errors import ApiError
from serving.api.http import set_up_logging
from serving.api.local import load_model, make_engine, open_configured_store
from serving.api.service import Service
from serving.api.turns import EngineLostError, Served, aside
from serving.auth import Keys
from serving.config import ChatTemplate, HttpSettings, Limits, ModelEntry, ServeConfig, is_local
from serving.engine import EngineStoppedError, Request
from serving.limits import Buckets
from serving.metrics import Metrics, RaySink
from serving.sessions.errors import StoreError
from serving.sessions.opening import store_url
from serving.sessions.store import Content

REPORT_SECONDS = 1.0
UPKEEP_SECONDS, USAGE_SECONDS = 60.0, 5.0
"""Between evictions, and between reports of what is stored (Ray forgets a gauge that is not written again)."""
log = logging.getLogger("pmi.api")


class WrongModelError(Exception):
    """This replica has other weights by now: `info` says which."""

    def __init__(self, info: ModelInfo) -> None:
        super().__init__(info)
        self.info = info


class EngineReplica:
    """One engine loop."""

    def __init__(self, config: dict[str, Any], model: dict[str, Any]) -> None:
        set_up_logging()
        self.config, entry = ServeConfig.model_validate(config), ModelEntry.model_validate(model)
        check_store(self.config)
        if self.config.engine.threads is not None:
            torch.set_num_threads(self.config.engine.threads)
        checkpoint, self.model = load_model(entry.checkpoint, entry.called, self.config.engine.device)
        self.store = open_configured_store(self.config)
        self.engine = make_engine(checkpoint, self.config, self.store)
        self.local = LocalEngine(self.engine, self.model, self.store, self.config.http.coalesce)
        self.metrics = Metrics(RaySink())
        self._over = threading.Event()
        threading.Thread(target=self._report, name="report", daemon=True).start()

    async def info(self) -> ModelInfo:
        """What it serves."""
        return self.model

    async def where(self) -> dict[str, Any]:
        """Process and load, for tests and operators."""
        active, waiting = self.engine.load
        return {"pid": os.getpid(), "active": active, "waiting": waiting, **vars(self.engine.counters)}

    async def generate(self, request: Request, fingerprint: str, progress: bool) -> AsyncGenerator[Chunk | Exception]:
        """See EngineClient; what the engine refuses comes as a value, so that it arrives as what it is."""
        if fingerprint != self.model.fingerprint:
            yield WrongModelError(self.model)
            return
        try:
            async with contextlib.aclosing(self.local.generate(request, progress)) as chunks:
                async for chunk in chunks:
                    yield chunk
        except UserError as error:
            yield error

    async def inspect(self, tenant: str, session: str) -> dict[str, Any] | Exception:
        """See EngineClient."""
        try:
            return await self.local.inspect(tenant, session)
        except (UserError, ApiError) as error:
            return error

    async def check(self, data: bytes) -> Content | Exception:
        """See EngineClient."""
        try:
            return await self.local.check(data)
        except UserError as error:
            return error

    def check_health(self) -> None:
        """Ray replaces the replica if this raises."""
        if not self.engine.alive:
            raise RuntimeError("the engine's loop has ended")

    def __del__(self) -> None:
        over = getattr(self, "_over", None)
        if over is not None:
            over.set()
            self.engine.close()
            self.store.close()

    def _report(self) -> None:
        """What the engine counts, to the metrics."""
        name, replica = self.model.name, f"{os.getpid()}"
        before: dict[str, float] = {}
        while not self._over.wait(REPORT_SECONDS):
            counters, journal = self.engine.counters, self.engine.journal
            now: dict[str, float] = {
                "pmi_engine_steps": counters.steps,
                "pmi_engine_generated": counters.generated,
                "pmi_engine_read": counters.prompt,
                "pmi_engine_failures": counters.failures,
                "pmi_replayed_tokens": counters.replayed,
            }
            if journal is not None:
                now |= {
                    "pmi_journal_transactions": journal.transactions,
                    "pmi_journal_seconds": journal.seconds,
                    "pmi_journal_bytes": journal.bytes,
                    "pmi_snapshots": journal.snapshots,
                    "pmi_snapshot_seconds": journal.snapshot_seconds,
                    "pmi_snapshot_bytes": journal.snapshot_bytes,
                }
            for metric, value in now.items():
                self.metrics(metric, value - before.get(metric, 0), model=name)
            # every session is taken from the store: nothing is kept hot between turns
            resumes = {"cold": counters.opened}
            for kind, value in resumes.items():
                self.metrics("pmi_resumes", value - before.get(kind, 0), model=name, kind=kind)
            before = {**now, **resumes}
            active, waiting = self.engine.load
            self.metrics("pmi_active", active, model=name, replica=replica)
            self.metrics("pmi_queued", waiting, model=name, replica=replica)
            self.metrics("pmi_batch_occupancy", min(1.0, active / self.config.engine.lanes), model=name, replica=replica)


class RayEngine:
    """The engine replicas of one model, as the API sees them."""

    def __init__(self, handle: DeploymentHandle, info: ModelInfo) -> None:
        self.handle, self.info = handle, info
        # plain pickle: what is sent has no lambdas, which cloudpickle looks for each time
        self._streams = handle.options(stream=True, request_serialization="pickle", response_serialization="pickle")

    async def generate(self, request: Request, progress: bool = False) -> AsyncGenerator[Chunk]:
        """See EngineClient."""
        handle = self._streams
        if request.session is not None:
            handle = handle.options(session_id=f"{request.tenant}/{request.session}")
        response = None
        try:
            response = handle.generate.remote(request, self.info.fingerprint, progress)
            async for item in response:
                if isinstance(item, WrongModelError):
                    raise EngineLostError(f"a replica with other weights ({item.info.fingerprint}) answered")
                if isinstance(item, Exception):
                    raise item
                yield item
        except BackPressureError as error:
            raise ApiError(503, "service_overloaded", "all engines are busy and their queues full; try again later") from error
        except (RayActorError, TaskCancelledError, RayServeException, grpc.RpcError) as error:
            raise EngineLostError((str(error) or type(error).__name__).splitlines()[0]) from error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            raise EngineLostError("the engine's replica stops") from error  # it is the replica that was cancelled, not we
        except RayError as error:
            log.exception("engine", extra={"facts": {"session": request.session}})
            raise EngineStoppedError("the engine failed; its log has the reason") from error
        finally:
            if response is not None:
                with contextlib.suppress(Exception):  # it tells again what went wrong
                    response.cancel()

    async def inspect(self, tenant: str, session: str) -> dict[str, Any]:
        """See EngineClient."""
        return await _value(self.handle.options(session_id=f"{tenant}/{session}").inspect.remote(tenant, session))

    async def check(self, data: bytes) -> Content:
        """See EngineClient."""
        return await _value(self.handle.check.remote(data))


async def _value(asked: Awaitable[Any]) -> Any:
    """What an engine answers to a question; 503 where it cannot."""
    try:
        found = await asked
    except BackPressureError as error:
        raise ApiError(503, "service_overloaded", "all engines are busy and their queues full; try again later") from error
    except (RayError, RayServeException, grpc.RpcError) as error:
        log.exception("engine")
        raise ApiError(503, "engine_lost", "the engine was lost, or could not be asked; send the request again") from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ApiError(503, "engine_lost", "the engine's replica stops; send the request again") from error
    if isinstance(found, Exception):
        raise found
    return found


class Keeper:
    """One for all: limits per tenant, and the store's upkeep."""

    def __init__(self, config: dict[str, Any]) -> None:
        set_up_logging()
        self.buckets, self.store = Buckets(), open_configured_store(ServeConfig.model_validate(config))
        self.metrics = Metrics(RaySink())
        self._upkeep = asyncio.get_running_loop().create_task(self._tidy())

    async def take(self, tenant: str, limits: Limits, tokens: int) -> tuple[str, float] | None:
        """See Limiter."""
        return await self.buckets.take(tenant, limits, tokens)

    async def give_back(self, tenant: str, limits: Limits, tokens: int) -> None:
        """See Limiter."""
        await self.buckets.give_back(tenant, limits, tokens)

    async def _tidy(self) -> None:
        last = 0.0
        while True:
            try:
                if time.monotonic() - last > UPKEEP_SECONDS:
                    last, evicted = time.monotonic(), await aside(self.store.evict)
                    self.metrics("pmi_evicted_sessions", evicted.sessions)
                    self.metrics("pmi_evicted_responses", evicted.responses)
                usage = await aside(self.store.usage)
                self.metrics("pmi_stored_bytes", usage.bytes + usage.response_bytes)
                self.metrics("pmi_stored_sessions", usage.sessions)
            except StoreError as error:
                log.error("upkeep", extra={"facts": {"error": str(error)}})
            await asyncio.sleep(USAGE_SECONDS)

    def check_health(self) -> None:
        """Ray replaces the replica if this raises."""
        if self._upkeep.done():
            raise RuntimeError("upkeep has ended")


class RemoteLimiter:
    """The Keeper, as the API sees it. While it is being replaced nobody is limited."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self.handle = handle

    async def take(self, tenant: str, limits: Limits, tokens: int) -> tuple[str, float] | None:
        """See Limiter."""
        try:
            return await self.handle.take.remote(tenant, limits, tokens)
        except (RayError, RayServeException, grpc.RpcError):
            return None

    async def give_back(self, tenant: str, limits: Limits, tokens: int) -> None:
        """See Limiter."""
        with contextlib.suppress(RayError, RayServeException, grpc.RpcError):
            self.handle.give_back.remote(tenant, limits, tokens)


@serve.ingress()
class Ingress:
    """Speaks HTTP."""

    async def __init__(  # type: ignore[misc]
        self, config: dict[str, Any], engines: dict[str, DeploymentHandle], keeper: DeploymentHandle
    ) -> None:
        set_up_logging()
        self.config = ServeConfig.model_validate(config)
        await check_reach(self.config)
        models = {model.called: model for model in self.config.models}
        infos = await asyncio.gather(*(handle.info.remote() for handle in engines.values()))
        served = [
            Served(RayEngine(handle, info), load_tokenizer(models[name].checkpoint), models[name].use == "all")
            for (name, handle), info in zip(engines.items(), infos, strict=True)
        ]
        keys = None if self.config.keys is None else Keys(self.config.keys)
        store = open_configured_store(self.config)
        self.service = Service(self.config, store, served, RemoteLimiter(keeper), Metrics(RaySink()), keys)

    def __serve_build_asgi_app__(self) -> Any:
        return make_app(self.service)

    def check_health(self) -> None:
        """Being asked is what tells a replica that it is not stopping: see Service.leaving."""
        self.service.asked = time.perf_counter()


def check_store(config: ServeConfig) -> None:
    """UserError where replicas could not share the store: SQLite is one machine's."""
    url = store_url(config.store)
    nodes = [node for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    if url.startswith("sqlite:") and len(nodes) > 1:
        raise UserError(
            f"store {url!r}: the cluster has {len(nodes)} nodes, and SQLite serves the replicas of one machine only; "
            "give a redis://HOST:PORT/DB that all of them reach"
        )


async def check_reach(config: ServeConfig) -> None:
    """UserError where strangers could ask without a key.

    Ray's own proxy tells who asks, and `Front` refuses other machines. HAProxy does not: it must listen on this one only.
    """
    from ray.serve._private.constants import RAY_SERVE_ENABLE_HA_PROXY, SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

    if config.keys is not None or not RAY_SERVE_ENABLE_HA_PROXY:
        return
    controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
    host = (await controller.get_http_config.remote()).host
    if not is_local(host):
        raise UserError(
            f"HAProxy listens on {host!r}: without API keys only 127.0.0.1 is allowed; make one with `pmi keys create`, then "
            "give its file as `keys`, or say `http_options: {host: 127.0.0.1}`"
        )


def engine_name(model: ModelEntry) -> str:
    """Of a model's deployment."""
    return f"engine-{model.edition}"


def application(config: ServeConfig) -> serve.Application:
    """Everything as one Serve application."""
    check_store(config)
    values, scaling, engine = config.model_dump(mode="json"), config.scaling, config.engine
    common = {
        "graceful_shutdown_timeout_s": scaling.drain, "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": scaling.health_period, "health_check_timeout_s": max(10.0, 3 * scaling.health_period),
    }  # fmt: skip
    ongoing = engine.lanes + engine.queue
    size: dict[str, Any] = {"num_replicas": scaling.replicas}
    if scaling.max_replicas is not None and scaling.max_replicas > scaling.replicas:
        target = scaling.target_ongoing or engine.lanes
        size = {
            "autoscaling_config": {
                "min_replicas": scaling.replicas, "max_replicas": scaling.max_replicas, "target_ongoing_requests": target,
                "upscale_delay_s": scaling.grow_after, "downscale_delay_s": scaling.shrink_after,
                # what is decided by is the mean over this time, asked for this often
                "look_back_period_s": min(30.0, scaling.grow_after), "metrics_interval_s": min(10.0, scaling.grow_after / 2),
            }
        }  # fmt: skip
    router = RequestRouterConfig(
        request_router_class="ray.serve.experimental.consistent_hash_router:ConsistentHashRouter",
        request_router_kwargs={"num_fallback_replicas": 1},
    )
    # an engine knows nothing of the other models, nor of who may ask from where: it stays as it is when these change
    http = config.http.model_copy(update={"host": HttpSettings().host})
    alone = config.model_copy(update={"models": (), "keys": None, "chat": ChatTemplate(), "http": http}).model_dump(mode="json")
    engines = {
        model.called: serve.deployment(EngineReplica)
        .options(
            name=engine_name(model), max_ongoing_requests=ongoing, max_queued_requests=ongoing,
            ray_actor_options={"num_cpus": scaling.engine_cpus, "num_gpus": scaling.engine_gpus},
            request_router_config=router, **size, **common,
        )
        .bind(alone, model.model_copy(update={"use": "all"}).model_dump(mode="json"))
        for model in config.models
        if model.use != "retired"
    }  # fmt: skip
    keeper = serve.deployment(Keeper).options(
        name="keeper", num_replicas=1, max_ongoing_requests=1000, ray_actor_options={"num_cpus": 0.01}
    )
    ingress = serve.deployment(Ingress).options(
        name="ingress", num_replicas=scaling.ingress_replicas, max_ongoing_requests=10 * config.http.ongoing,
        max_queued_requests=config.http.queued, ray_actor_options={"num_cpus": 0.05}, **common,
    )  # fmt: skip
    return ingress.bind(values, engines, keeper.bind(alone))
