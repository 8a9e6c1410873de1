"""What the service does about Ray itself, without a cluster: errors of its transport, and settings that cannot change."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from ray.exceptions import ActorDiedError
from ray.serve._private.common import DeploymentID
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from lm.errors import UserError
from serving import deployments, serve_cli
from serving.api.engines import ModelInfo
from serving.api.errors import ApiError
from serving.config import Limits, ServeConfig, is_local
from serving.deployments import RayEngine, RemoteLimiter
from serving.local_ray import BASE
from serving.sessions.errors import InvalidError

NOWHERE = DeploymentUnavailableError(DeploymentID(name="engine", app_name="pmi"))
OVER = BackPressureError(num_queued_requests=1, max_queued_requests=1)


class Handle:
    """A deployment whose every method answers so."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def options(self, **_: Any) -> "Handle":
        return self

    def __getattr__(self, name: str) -> Any:
        return self

    async def remote(self, *_: Any) -> Any:
        if isinstance(self.answer, BaseException) and not isinstance(self.answer, InvalidError):
            raise self.answer
        return self.answer


def engine(answer: Any) -> RayEngine:
    return RayEngine(Handle(answer), ModelInfo("m", "f", "t", 8, 257, 0))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "error", [grpc.RpcError("RESOURCE_EXHAUSTED"), ActorDiedError(), NOWHERE, OVER, asyncio.CancelledError()]
)
@pytest.mark.parametrize("ask", [lambda x: x.check(b"file"), lambda x: x.inspect("local", "s")], ids=["check", "inspect"])
def test_an_engine_that_cannot_be_asked_is_a_503(ask: Any, error: BaseException) -> None:
    with pytest.raises(ApiError) as caught:
        asyncio.run(ask(engine(error)))
    assert caught.value.status == 503
    assert caught.value.code == ("service_overloaded" if error is OVER else "engine_lost")
    assert caught.value.retry is not None


def test_what_an_engine_refuses_arrives_as_what_it_is() -> None:
    with pytest.raises(InvalidError, match="damaged"):
        asyncio.run(engine(InvalidError("damaged")).check(b"file"))
    assert asyncio.run(engine({"position": 3}).inspect("local", "s")) == {"position": 3}


@pytest.mark.parametrize("error", [grpc.RpcError(), ActorDiedError(), NOWHERE])
def test_nobody_is_limited_while_the_keeper_is_replaced(error: Exception) -> None:
    limiter = RemoteLimiter(Handle(error))  # type: ignore[arg-type]
    assert asyncio.run(limiter.take("ada", Limits(requests_per_minute=1), 1)) is None


def test_rays_messages_may_be_as_large_as_a_session() -> None:
    assert int(BASE["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"]) >= ServeConfig().http.import_bytes * 4


def test_what_only_a_new_start_can_change_is_refused_by_a_reload() -> None:
    old = ServeConfig.model_validate({"http": {"port": 8000}})
    serve_cli._check_reload(old, ServeConfig.model_validate({"http": {"port": 8000}, "revision": "2"}))
    changed = ServeConfig.model_validate({"http": {"port": 9000, "host": "::1", "throughput": True}})
    with pytest.raises(UserError) as caught:
        serve_cli._check_reload(old, changed)
    assert [problem.split(":")[0] for problem in caught.value.problems] == ["http.host", "http.port", "http.throughput"]
    assert "8000 cannot become 9000 while the service runs" in caught.value.problems[1]


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "localhost"])
def test_ports_are_tried_on_every_kind_of_local_address(host: str) -> None:
    serve_cli._check_port(host, 0)
    assert is_local(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "testclient", "", None])
def test_other_addresses_are_not_local(host: str | None) -> None:
    assert not is_local(host)


@pytest.mark.parametrize(
    ("proxy", "host", "fine"), [(True, "127.0.0.1", True), (True, "0.0.0.0", False), (False, "0.0.0.0", True)]
)
def test_behind_haproxy_which_hides_who_asks_keys_are_needed_beyond_this_machine(
    monkeypatch: pytest.MonkeyPatch, proxy: bool, host: str | None, fine: bool
) -> None:
    options = SimpleNamespace(host=host)
    monkeypatch.setattr("ray.serve._private.constants.RAY_SERVE_ENABLE_HA_PROXY", proxy)
    monkeypatch.setattr(deployments.ray, "get_actor", lambda *_, **__: Handle(options))
    if fine:
        asyncio.run(deployments.check_reach(ServeConfig()))
    else:
        with pytest.raises(UserError, match="pmi keys create"):
            asyncio.run(deployments.check_reach(ServeConfig()))


def test_engine_and_keeper_of_a_service_for_other_machines_start_without_its_keys(folder: Path) -> None:
    """They listen nowhere: what is refused at the door must not be refused to them, who are given no keys."""
    config = ServeConfig.model_validate(
        {"http": {"host": "0.0.0.0", "coalesce": 0.5}, "keys": "keys.json", "models": [{"checkpoint": str(folder)}]}
    )
    _, engines, keeper = deployments.application(config)._bound_deployment.init_args
    (engine,) = engines.values()
    for part in (engine, keeper):
        found = ServeConfig.model_validate(part._bound_deployment.init_args[0])
        assert found.keys is None
        assert found.http.coalesce == 0.5
