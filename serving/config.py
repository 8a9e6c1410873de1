"""The service's configuration: every key, what it means, what it may be (configs/serve/NAME.yaml, `pmi serve --config`)."""

import hashlib
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from lm.config_files import Schema, configs_folder, override, read_mapping, validate
from lm.errors import UserError


def is_local(host: str | None) -> bool:
    """Whether only this machine reaches, or is, this address."""
    if host == "localhost":
        return True
    try:
        address = ip_address(host or "")
    except ValueError:
        return False
    return (getattr(address, "ipv4_mapped", None) or address).is_loopback


class ModelEntry(Schema):
    """One checkpoint that is served."""

    checkpoint: Path
    """A model folder; on a cluster, the same path on every node."""
    name: str = ""
    """What clients call it (default: the folder's name, or its parent's where that is `model`)."""
    use: Literal["all", "sessions", "retired"] = "all"
    """sessions: go on with the sessions it has, nothing new. retired: not started; its sessions are told so (409)."""

    @property
    def edition(self) -> str:
        """Changes whenever the weights in the folder do: replicas of one edition are alike."""
        weights = self.checkpoint / "model.safetensors"
        found = weights.stat()
        return hashlib.sha256(f"{weights} {found.st_mtime_ns} {found.st_size}".encode()).hexdigest()[:8]

    @property
    def called(self) -> str:
        """The name clients use."""
        folder = self.checkpoint.resolve()
        return self.name or (folder.parent.name if folder.name == "model" else folder.name)


class EngineSettings(Schema):
    """The engine of each replica."""

    lanes: int = Field(32, ge=1, le=4096)
    """Sequences that are generated together."""
    queue: int = Field(64, ge=1, le=100_000)
    """Requests that may wait for a lane; more are answered with 429."""
    threads: int | None = Field(1, ge=1)
    """Threads of torch in each replica (null: torch's own choice)."""
    device: str = "auto"
    """Where a replica's model runs: auto, cpu or cuda, which needs `scaling.engine_gpus` (GPUs are untested so far)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """What the decoder computes in; the memory stays float32. A session goes on in the type it was begun in."""
    lease: float = Field(4.0, gt=0.1, le=60)
    """Seconds after which a crashed replica's sessions are free again."""
    snapshot_segments: int = Field(32, ge=1)
    """While a long prompt is read, a snapshot is stored every so many segments."""


class ScalingSettings(Schema):
    """How many replicas there are."""

    replicas: int = Field(1, ge=1)
    """Engine replicas of each model to start with (with autoscaling: the least)."""
    max_replicas: int | None = Field(None, ge=1)
    """More than `replicas`: scale by ongoing requests up to so many."""
    target_ongoing: float | None = Field(None, gt=0)
    """Requests per replica, in lanes or waiting, that autoscaling aims at (default: as many as there are lanes)."""
    grow_after: float = Field(10.0, gt=0)
    """Seconds that the load must last before autoscaling adds replicas."""
    shrink_after: float = Field(300.0, gt=0)
    """Seconds of less load before it removes some (their streams are finished first)."""
    ingress_replicas: int = Field(1, ge=1)
    """Replicas that speak HTTP."""
    engine_cpus: float = Field(0.1, ge=0)
    """Cores that Ray reserves for an engine replica (not a limit)."""
    engine_gpus: float = Field(0.0, ge=0)
    """GPUs that Ray gives to an engine replica; without any it sees none."""
    drain: float = Field(120.0, ge=0)
    """Seconds that a replica that is to stop may go on with its streams; longer ones are cut off, and can be resumed."""
    health_period: float = Field(2.0, gt=0)
    """Seconds between health checks."""


class Limits(Schema):
    """What one tenant may use; null: no limit. Shared by all replicas."""

    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    """Read and generated."""
    sessions: int | None = Field(None, ge=0)
    stored_bytes: int | None = Field(None, ge=0)
    """Sessions and responses together."""
    prompt_tokens: int = Field(1_000_000, ge=1)
    """Tokens of one prompt."""
    max_tokens: int = Field(16_384, ge=1)
    """Tokens that one request may generate."""


class ChatTemplate(Schema):
    """How messages become text. The default is plain, for base models, which know no roles."""

    message: str = "{role}: {content}\n"
    """One message; {role} and {content} are put in."""
    answer: str = "assistant: "
    """What stands before the model's own message."""
    end: str = "\n"
    """What closes the model's message once the next one comes."""
    stop: tuple[str, ...] = ("\nuser:", "\nsystem:")
    """Strings that end the model's message, besides those of the request."""

    @field_validator("message")
    @classmethod
    def _has_content(cls, value: str) -> str:
        if "{content}" not in value:
            raise ValueError("must hold {content}; for example '{role}: {content}\\n'")
        return value


class HttpSettings(Schema):
    """The HTTP side."""

    host: str = "127.0.0.1"
    """Address to listen on; without API keys only this machine's own are allowed."""
    port: int = Field(8000, ge=0, le=65_535)
    body_bytes: int = Field(16 << 20, ge=1024)
    """Largest body of a request; larger ones are answered with 413."""
    import_bytes: int = Field(256 << 20, ge=1024)
    """Largest session file for PUT /memory."""
    imports: int = Field(2, ge=1)
    """Of those larger than `body_bytes`, how many one ingress replica takes at once; more are answered with 503."""
    send_seconds: float = Field(60.0, gt=0)
    """A client that takes nothing of its answer for so long is taken to have left."""
    body_seconds: float = Field(30.0, gt=0)
    """A client that takes longer to send its request is answered with 408."""
    coalesce: float = Field(0.02, ge=0, le=1)
    """Seconds that tokens are gathered for one event, after the first, which comes at once. Longer with more than 8 streams."""
    ongoing: int = Field(512, ge=1)
    """Requests that one ingress replica handles at once."""
    queued: int = Field(1024, ge=1)
    """Requests that may wait for one; more are answered with 503."""
    throughput: bool = False
    """Ray's throughput mode: HAProxy in front instead of a proxy in Python (Linux). On a cluster, set Ray's environment."""


class ServeConfig(Schema):
    """What `pmi serve` runs."""

    revision: str = ""
    """Change it to start all replicas anew, one after the other: what a new version of the code needs."""
    models: tuple[ModelEntry, ...] = ()
    store: str | None = None
    """sqlite:///FILE or redis://HOST:PORT/DB (default: PMI_STORE, else a file in the user's data folder)."""
    durability: str = "full"
    """full, or relaxed: let a crash of the machine lose the newest answers."""
    keys: Path | None = None
    """File of API keys that `pmi keys` writes; none: one tenant, this machine only."""
    limits: Limits = Limits()
    """Of tenants whose key says nothing else."""
    session_ttl: float | None = Field(None, gt=0)
    """Seconds after its last change that a session may be removed (null: never)."""
    store_bytes: int | None = Field(None, ge=0)
    """Room for all sessions; the longest unchanged go first."""
    response_ttl: float = Field(86_400.0, gt=0)
    """Seconds that an answer can be resumed or asked for again."""
    temperature: float = Field(0.8, ge=0, le=100)
    """Where neither the request nor its session says."""
    max_tokens: int = Field(256, ge=1)
    """Tokens that are generated where the request does not say."""
    engine: EngineSettings = EngineSettings()
    scaling: ScalingSettings = ScalingSettings()
    chat: ChatTemplate = ChatTemplate()
    http: HttpSettings = HttpSettings()

    @model_validator(mode="after")
    def _fits(self) -> "ServeConfig":
        problems = []
        names = [model.called for model in self.models]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            problems.append(f"models: {', '.join(twice)} twice; give each a `name` of its own")
        served = [model.checkpoint.resolve() for model in self.models if model.use != "retired"]
        if len(set(served)) < len(served):
            again = ", ".join(sorted({str(folder) for folder in served if served.count(folder) > 1}))
            problems.append(f"models: {again} under two names; sessions belong to weights, so serve these under one name")
        if self.keys is None and not is_local(self.http.host):
            problems.append(
                f"http.host {self.http.host!r}: without API keys only 127.0.0.1 is allowed; make one with `pmi keys create`, "
                "then give its file as `keys`"
            )
        if self.engine.device.startswith("cuda") and not self.scaling.engine_gpus:
            problems.append(
                f"engine.device {self.engine.device!r}: Ray shows a replica only the GPUs that are reserved for it; "
                "--set scaling.engine_gpus=1"
            )
        if problems:
            raise ValueError("\n".join(problems))
        return self


def load_serve_config(path: str | None, changes: dict[str, Any], overrides: list[str] | None = None) -> ServeConfig:
    """The configuration in a file (a path, or a name in configs/serve/), with changes by dotted key, then overrides."""
    values: dict[str, Any] = {}
    source = path or "serve"
    if path is not None:
        file = Path(path)
        if not file.is_file():
            file = configs_folder() / "serve" / f"{path}.yaml"
        if not file.is_file():
            known = sorted(x.stem for x in (configs_folder() / "serve").glob("*.yaml"))
            raise UserError(f"--config {path!r}: neither a file nor one of the shipped {known}")
        values = read_mapping(file)
    for key, value in changes.items():
        place = values
        *parents, last = key.split(".")
        for part in parents:
            place = place.setdefault(part, {})
        place[last] = value
    return validate(ServeConfig, override(values, overrides or []), source)
