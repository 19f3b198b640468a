"""The engine's metrics for Prometheus."""

from collections.abc import Iterator, Mapping

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from starlette.responses import Response

_PREFIX = "c2_rollout_"
_COUNTERS = {
    "prompt_tokens": "Tokens of prompts.",
    "prefix_tokens": "Tokens of prompts that were in the prefix cache.",
    "tokens": "Tokens of completions.",
    "ended": "Sequences that have ended, cancelled ones included.",
    "compilations": "Programs compiled; constant after the start.",
}
_GAUGES = {
    "waiting": "Sequences that wait for a slot.",
    "running": "Sequences that have a slot.",
    "open": "Sequences of HTTP requests that are being answered.",
    "version": "Policy version.",
    "pause_s": "Seconds that the newest weights held up running sequences.",
    "acceptance": "Share of drafts that were kept.",
    "speculates": "Whether drafts pay.",
}


class _Snapshot:
    def __init__(self, values: Mapping[str, float]) -> None:
        self._values = values

    def collect(self) -> Iterator[Metric]:
        for name, value in self._values.items():
            if name in _COUNTERS:
                yield CounterMetricFamily(_PREFIX + name, _COUNTERS[name], value)
            else:
                yield GaugeMetricFamily(_PREFIX + name, _GAUGES.get(name, name), value)


def response(values: Mapping[str, float]) -> Response:
    """The metrics of `Scheduler.metrics` and the server's own, in Prometheus' text format."""
    content = generate_latest(_Snapshot(values))
    return Response(content, headers={"Content-Type": CONTENT_TYPE_LATEST})
