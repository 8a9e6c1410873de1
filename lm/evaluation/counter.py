"""What an evaluation on Ray counts: an actor that knows how far all tasks are, and metrics on Ray's Prometheus ports.

Apart from cluster.py so that the actor's process need not load torch.
"""

from typing import Any


class Counter:
    """What the tasks of a pass have read: tokens (a task that starts again counts from 0), and the documents that ended."""

    def __init__(self) -> None:
        self.tokens: dict[str, dict[int, int]] = {}
        self.ended: dict[str, list[dict[str, Any]]] = {}

    def report(self, part: str, task: int, tokens: int, ended: list[dict[str, Any]]) -> None:
        """Task `task` of a pass has read so many tokens; `ended` are the outcomes (as JSON) since its last report."""
        self.tokens.setdefault(part, {})[task] = tokens
        self.ended.setdefault(part, []).extend(ended)

    def news(self, part: str) -> tuple[int, list[dict[str, Any]]]:
        """Tokens read by all tasks of a pass, and the outcomes that came since this was asked before."""
        return sum(self.tokens.get(part, {}).values()), self.ended.pop(part, [])


_made: dict[str, Any] = {}


def metrics() -> dict[str, Any]:
    """This process's metrics, made once: Ray counts a second of the same name apart."""
    from ray.util import metrics as ray_metrics

    if not _made:
        _made["tokens"] = ray_metrics.Counter("pmi_eval_tokens_total", "tokens predicted")
        _made["documents"] = ray_metrics.Counter("pmi_eval_documents_total", "documents read to their end")
        _made["failures"] = ray_metrics.Gauge("pmi_eval_failures", "tasks of this run lost with their worker")
        _made["speed"] = ray_metrics.Gauge("pmi_eval_tokens_per_second", "tokens predicted per second by a worker")
    return _made
