"""Metrics for Prometheus: one table, written through prometheus_client (one process) or through Ray (a whole cluster).

On Ray they come out on each node's metrics port with `ray_` before their names. Tenants are labels: the first hundred by name,
the others together, so that keys cannot flood the server.
"""

from typing import Any, Literal, NamedTuple, Protocol

TENANTS = 100
OTHERS = "others"
SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Metric(NamedTuple):
    """One line of the table."""

    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()


METRICS: dict[str, Metric] = {
    "pmi_requests": Metric("counter", "Requests answered.", ("tenant", "route", "status")),
    "pmi_errors": Metric("counter", "Errors, by their code; also those in the middle of a stream.", ("code",)),
    "pmi_first_token_seconds": Metric("histogram", "From the request to its first token.", ("model",)),
    "pmi_token_seconds": Metric("histogram", "Between tokens of one stream.", ("model",)),
    "pmi_tokens_in": Metric("counter", "Tokens of prompts.", ("tenant", "model")),
    "pmi_tokens_out": Metric("counter", "Tokens generated.", ("tenant", "model")),
    "pmi_joined": Metric("counter", "Retries answered with the response of the request before."),
    "pmi_failovers": Metric("counter", "Streams taken up from an engine that was lost."),
    "pmi_conflicts": Metric("counter", "Requests refused with 409, by code.", ("code",)),
    "pmi_limited": Metric("counter", "Requests refused because of a tenant's limit.", ("tenant", "limit")),
    "pmi_disconnects": Metric("counter", "Clients that left before their answer was complete."),
    "pmi_active": Metric("gauge", "Sequences in an engine's lanes.", ("model", "replica")),
    "pmi_queued": Metric("gauge", "Requests that wait for a lane.", ("model", "replica")),
    "pmi_batch_occupancy": Metric("gauge", "Share of the lanes that is in use.", ("model", "replica")),
    "pmi_engine_steps": Metric("counter", "Steps of the engine.", ("model",)),
    "pmi_engine_generated": Metric("counter", "Tokens generated, as the engine counts.", ("model",)),
    "pmi_engine_read": Metric("counter", "Tokens of prompts read, as the engine counts.", ("model",)),
    "pmi_engine_failures": Metric("counter", "Steps in which the model failed.", ("model",)),
    "pmi_resumes": Metric("counter", "Sessions resumed; cold: from the store (nothing is kept hot so far).", ("model", "kind")),
    "pmi_replayed_tokens": Metric("counter", "Tokens read again to resume sessions.", ("model",)),
    "pmi_journal_transactions": Metric("counter", "Transactions of the journal.", ("model",)),
    "pmi_journal_seconds": Metric("counter", "Seconds that they took, encoding snapshots included.", ("model",)),
    "pmi_journal_bytes": Metric("counter", "Bytes of ids and snapshots in them.", ("model",)),
    "pmi_snapshots": Metric("counter", "Snapshots written.", ("model",)),
    "pmi_snapshot_seconds": Metric("counter", "Seconds that encoding them took.", ("model",)),
    "pmi_snapshot_bytes": Metric("counter", "Bytes of snapshots written.", ("model",)),
    "pmi_evicted_sessions": Metric("counter", "Sessions removed because of age or room."),
    "pmi_evicted_responses": Metric("counter", "Responses removed because of age or room."),
    "pmi_stored_bytes": Metric("gauge", "Bytes of all sessions and responses."),
    "pmi_stored_sessions": Metric("gauge", "Sessions in the store."),
}


class Sink(Protocol):
    """Where values go."""

    def write(self, name: str, value: float, labels: dict[str, str]) -> None:
        """Add to a counter, set a gauge, note in a histogram."""


class Metrics:
    """The table with a sink behind it."""

    def __init__(self, sink: Sink) -> None:
        self.sink = sink
        self._tenants: set[str] = set()

    def __call__(self, name: str, value: float = 1.0, /, **labels: str) -> None:
        """Write one value."""
        tenant = labels.get("tenant")
        if tenant is not None and tenant not in self._tenants:
            if len(self._tenants) >= TENANTS:
                labels["tenant"] = OTHERS
            else:
                self._tenants.add(tenant)
        if METRICS[name].kind != "counter" or value > 0:
            self.sink.write(name, value, labels)


class PrometheusSink:
    """One process: a registry of prometheus_client, for `GET /metrics`."""

    def __init__(self) -> None:
        import prometheus_client as prometheus

        self.registry = prometheus.CollectorRegistry()
        kinds: dict[str, Any] = {"counter": prometheus.Counter, "gauge": prometheus.Gauge}
        self._made: dict[str, Any] = {}
        for name, metric in METRICS.items():
            if metric.kind == "histogram":
                made = prometheus.Histogram(name, metric.help, metric.labels, buckets=SECONDS, registry=self.registry)
            else:
                made = kinds[metric.kind](name, metric.help, metric.labels, registry=self.registry)
            self._made[name] = made

    def write(self, name: str, value: float, labels: dict[str, str]) -> None:
        """See Sink."""
        made = self._made[name].labels(**labels) if labels else self._made[name]
        match METRICS[name].kind:
            case "counter":
                made.inc(value)
            case "gauge":
                made.set(value)
            case "histogram":
                made.observe(value)

    def text(self) -> bytes:
        """What a scrape answers."""
        from prometheus_client import generate_latest

        return generate_latest(self.registry)


class RaySink:
    """Through Ray to the node's metrics port."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def write(self, name: str, value: float, labels: dict[str, str]) -> None:
        """See Sink."""
        from ray.util import metrics

        made = self._made.get(name)
        metric = METRICS[name]
        if made is None:
            more = {"boundaries": list(SECONDS)} if metric.kind == "histogram" else {}
            kinds = {"counter": metrics.Counter, "gauge": metrics.Gauge, "histogram": metrics.Histogram}
            made = kinds[metric.kind](name, description=metric.help, tag_keys=metric.labels, **more)
            self._made[name] = made
        match metric.kind:
            case "counter":
                made.inc(value, tags=labels)
            case "gauge":
                made.set(value, tags=labels)
            case "histogram":
                made.observe(value, tags=labels)
