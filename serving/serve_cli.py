"""`pmi serve` and `pmi keys`. Heavy imports stay inside commands."""

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from lm.commands import Commands, Device, stderr, stdout
from lm.errors import UserError, collecting, noting
from lm.machine import free_port, give_way
from serving.local_ray import environment

if TYPE_CHECKING:
    from serving.config import ServeConfig

keys_app = Commands(help="API keys: create, list, remove.")
EXAMPLE = "Example: pmi serve --checkpoint runs/demo/model --store sqlite:///sessions.db --replicas 2"
Keys = Annotated[
    Path | None, typer.Option("--keys", help="The file of keys (default: PMI_KEYS, else keys.json in your data folder).")
]


def mount(app: Commands) -> None:
    """Add the commands to `app`."""
    app.command(epilog=EXAMPLE)(serve)
    app.add_typer(keys_app, name="keys")


def serve(
    checkpoint: Annotated[list[Path], typer.Option(help="A model folder; several are served side by side.")] = [],  # noqa: B006
    config: Annotated[str | None, typer.Option(help="A configuration: a file, or a name in configs/serve/.")] = None,
    store: Annotated[
        str | None, typer.Option(help="sqlite:///FILE or redis://HOST:PORT/DB (default: PMI_STORE, else your file).")
    ] = None,
    replicas: Annotated[int | None, typer.Option(help="Engine replicas of each model.", min=1)] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on (others than 127.0.0.1 need --keys).")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the API (0: a free one).", min=0, max=65535)] = None,
    keys: Annotated[Path | None, typer.Option(help="A file of API keys (see pmi keys create).")] = None,
    metrics_port: Annotated[int, typer.Option(help="Port of the metrics (0: a free one).", min=0, max=65535)] = 0,
    device: Device = "auto",
    set_: Annotated[
        list[str], typer.Option("--set", metavar="KEY=VALUE", help="Change a configuration key; may be repeated.")
    ] = [],  # noqa: B006
) -> None:
    """Serve models over HTTP, as OpenAI's clients know it, with sessions.

    Starts a Ray of its own on this machine and serves until it is interrupted; streams under way are then finished. On a cluster
    that runs already use `serve run serving.app:build` or `serve deploy` (docs/serving.md). With SIGHUP it reads --config again
    and changes over without interruption.
    """
    from lm.model.pretrained import check_folder, resolve_device
    from serving.config import ServeConfig, load_serve_config

    changes: dict[str, Any] = {}
    for key, value in {
        "store": store, "scaling.replicas": replicas, "http.host": host, "http.port": port,
        "keys": None if keys is None else str(keys.resolve()), "engine.device": None if device == "auto" else device,
    }.items():  # fmt: skip
        if value is not None:
            changes[key] = value
    if checkpoint:
        changes["models"] = [{"checkpoint": str(folder.resolve())} for folder in checkpoint]

    def load() -> ServeConfig:
        return load_serve_config(config, changes, set_)

    settings: dict[str, str] = {}
    with collecting() as problems:
        loaded = ServeConfig()
        with noting(problems):
            loaded = load()
        with noting(problems):
            resolve_device(loaded.engine.device)
        serving = [model for model in loaded.models if model.use != "retired"]
        if not any(model.use == "all" for model in serving) and not problems:
            problems.append("--checkpoint: is required, or `models` in --config; `pmi demo` makes a model to try")
        for model in serving:
            with noting(problems):
                check_folder(model.checkpoint)
        if loaded.keys is not None and not loaded.keys.is_file():
            problems.append(
                f"--keys {loaded.keys}: no such file; make it with `pmi keys create --tenant NAME --keys {loaded.keys}`"
            )
        with noting(problems):
            _check_store(loaded)
        chosen, chosen_metrics = loaded.http.port or free_port(), metrics_port or free_port()
        with noting(problems):
            _check_port(loaded.http.host, chosen)
        with noting(problems):
            settings = environment(loaded.http, os.environ)
    os.environ |= settings
    _run(loaded, load, chosen, chosen_metrics)


def _run(config: "ServeConfig", load: Callable[[], "ServeConfig"], port: int, metrics_port: int) -> None:
    began = time.monotonic()
    with stderr.status("starting Ray") as status:
        import logging

        import ray

        give_way()  # Ray's processes inherit it
        try:
            ray.init(
                address="local", include_dashboard=False, object_store_memory=200 << 20, _metrics_export_port=metrics_port,
                logging_level=logging.ERROR, log_to_driver=False, configure_logging=True,
            )  # fmt: skip
        except Exception as error:  # Ray's own are of many kinds; it gives up after 30 s, whatever else the machine does
            raise UserError(
                f"Ray did not start ({error}); see /tmp/ray/session_latest/logs, or try again with less load"
            ) from error
        os.environ["RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP"] = "1"  # this process, unlike a replica, has no event loop
        from ray import serve as rayserve

        from serving.config import is_local
        from serving.deployments import application

        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        status.update("starting the service")
        try:
            rayserve.start(http_options={"host": config.http.host, "port": port, "request_timeout_s": None})
            rayserve.run(application(config), name="pmi", route_prefix="/", _local_testing_mode=False)
        except (RuntimeError, ray.exceptions.RayError) as error:
            rayserve.shutdown()
            ray.shutdown()
            # the last line: Ray puts the stack of another process before it
            why = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
            raise UserError(f"the service did not start: {why}; try again, or with another --port") from error
    over: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):  # only now: Ray puts its own in place, which print a stack
        signal.signal(number, lambda got, _: over.append(got))
    name = config.http.host if is_local(config.http.host) else socket.gethostname()
    where = f"http://[{name}]:{port}" if ":" in name else f"http://{name}:{port}"
    _tell(config, where, metrics_port, time.monotonic() - began)
    _tell_retired(config)
    again: list[int] = []
    signal.signal(signal.SIGHUP, lambda got, _: again.append(got))
    while not over:
        time.sleep(0.2)
        if again:
            again.clear()
            try:
                changed = load()
                _check_reload(config, changed)
                rayserve.run(application(changed), name="pmi", route_prefix="/")
                config = changed
                stdout.print(f"updated: {', '.join(f'{m.called} ({m.use})' for m in config.models)}")
                _tell_retired(config)
            except (UserError, OSError, RuntimeError) as error:
                stderr.print(f"not updated: {error}", markup=False)
    stderr.print("stopping: streams under way are finished first (interrupt again to cut them off)")
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda got, _: os._exit(130))
    # Serve's own shutdown begins with the proxies, which cuts every stream off: first the application, while they live
    rayserve.delete("pmi", _blocking=False)
    give_up = time.monotonic() + config.scaling.drain + 15
    while "pmi" in rayserve.status().applications and time.monotonic() < give_up:
        time.sleep(0.3)
    rayserve.shutdown()
    ray.shutdown()


def _check_reload(old: "ServeConfig", new: "ServeConfig") -> None:
    """UserError where a change needs a new start: what Ray's proxy was started with stays as it is."""
    problems = []
    for name in ("host", "port", "throughput"):
        before, after = getattr(old.http, name), getattr(new.http, name)
        if before != after:
            problems.append(f"http.{name}: {before!r} cannot become {after!r} while the service runs; stop it and start it again")
    if problems:
        raise UserError(problems)


def _tell_retired(config: "ServeConfig") -> None:
    """The sessions in the store whose model is not served, so that nobody loses one unawares."""
    from ray import serve as rayserve

    from serving.api.local import open_configured_store
    from serving.deployments import engine_name

    served = {
        rayserve.get_deployment_handle(engine_name(model), app_name="pmi").info.remote().result().fingerprint
        for model in config.models
        if model.use != "retired"
    }
    store, after = open_configured_store(config), None
    found: dict[str, list[str]] = {}
    while True:
        page = store.list(None, after, 1000)
        for session in page.sessions:
            if session.settings.model not in served:
                found.setdefault(session.settings.model, []).append(f"{session.tenant}/{session.id}")
        after = page.next
        if after is None:
            break
    store.close()
    for model, names in found.items():
        shown = ", ".join(names[:10]) + (f" and {len(names) - 10} more" if len(names) > 10 else "")
        stdout.print(f"model {model} is not served; it has {len(names)} sessions: {shown}", soft_wrap=True, markup=False)


def _tell(config: Any, where: str, metrics_port: int, seconds: float) -> None:
    """How to reach it."""
    model = next(model.called for model in config.models if model.use == "all")
    key = " -H 'Authorization: Bearer pmi-...'" if config.keys is not None else ""
    body = json.dumps({"model": model, "prompt": "The whale", "max_tokens": 40})
    stdout.print(
        f"serving {', '.join(m.called for m in config.models if m.use != 'retired')} at {where}/v1 after {seconds:.0f} s"
    )
    if config.keys is None:
        stdout.print("no API keys: this machine only (pmi keys create makes one, --keys FILE uses them)")
    stdout.print(f"metrics: http://127.0.0.1:{metrics_port}/metrics     API: {where}/docs", soft_wrap=True)
    if os.environ.get("RAY_AUTH_MODE") == "disabled":
        stdout.print("RAY_AUTH_MODE=disabled: whoever reaches Ray's ports can run programs here (docs/security.md)")
    print(f"try: curl{key} {where}/v1/completions -H 'Content-Type: application/json' -d '{body}'", flush=True)


def _check_store(config: Any) -> None:
    """Whether the store can be opened: better told now than by every replica."""
    from serving.api.local import open_configured_store

    open_configured_store(config).close()


def _check_port(host: str, port: int) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind((host, port))
        except OSError as error:
            raise UserError(
                f"--port {port}: cannot listen on {host} ({error.strerror}); choose another, or 0 for a free one"
            ) from error


# --- keys ----------------------------------------------------------------------------------------------------------


def _file(given: Path | None) -> Path:
    from serving.sessions.opening import default_file

    named = os.environ.get("PMI_KEYS")
    return given or (Path(named) if named else default_file().with_name("keys.json"))


@keys_app.command("create", epilog="Example: pmi keys create --tenant ada --keys keys.json --limit tokens_per_minute=100000")
def create(
    tenant: Annotated[str, typer.Option(help="Whose key: its sessions are seen by nobody else.")],
    keys: Keys = None,
    limit: Annotated[list[str], typer.Option(metavar="NAME=NUMBER", help="A limit of this tenant; may be repeated.")] = [],  # noqa: B006
) -> None:
    """Make a key and print it: it is shown this once, the file keeps only a hash."""
    from lm.config_files import override, validate
    from serving.auth import Keys as KeyFile
    from serving.config import Limits

    limits = validate(Limits, override({}, limit), "--limit") if limit else None
    path = _file(keys)
    made = KeyFile(path).create(tenant, limits)
    print(made)
    stderr.print(f"written to {path}: a running service sees it within a second", style="dim")


@keys_app.command("ls", epilog="Example: pmi keys ls --keys keys.json")
def ls(keys: Keys = None) -> None:
    """List the keys, without their secrets."""
    from serving.auth import Keys as KeyFile

    table = Table("key", "tenant", "created", "limits")
    for key in KeyFile(_file(keys)).all():
        shown = "" if key.limits is None else ", ".join(f"{k}={v}" for k, v in key.limits.model_dump(exclude_unset=True).items())
        table.add_row(f"pmi-{key.id}-...", key.tenant, time.strftime("%Y-%m-%d %H:%M", time.localtime(key.created)), shown)
    stdout.print(table)


@keys_app.command("rm", epilog="Example: pmi keys rm 1a2b3c4d --keys keys.json")
def rm(id: Annotated[str, typer.Argument(help="The part between the dashes.")], keys: Keys = None) -> None:
    """Remove a key: from then on it opens nothing."""
    from serving.auth import Keys as KeyFile

    KeyFile(_file(keys)).remove(id)
