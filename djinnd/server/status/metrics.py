"""Metrics for Prometheus. Each scrape reads the state of that moment; nothing is counted for Prometheus alone.

Values that only the engine knows are left out while it does not answer, so that no gauge is a guess. The count of
tokens starts again with each engine, as Prometheus allows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache

from prometheus_client import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily as Counter
from prometheus_client.metrics_core import GaugeMetricFamily as Gauge
from prometheus_client.metrics_core import HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from djinn_client.protocol import Class, ModelInfo
from djinnd import __version__
from djinnd.messages import Report
from djinnd.server.quotas.latency import Histogram, Latencies
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.status.status import Status, TenantFigures

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_EVERY = 3  # exports each third bound of a histogram: two to a doubling
_label = cache(floatToGoString)
_LATENCIES = {
    "queued": "From the receipt of a call to its first row in a step.",
    "first_token": "From the receipt of a call to its first token.",
    "between_tokens": "Between two tokens of a call.",
    "wake_up": "Of sessions whose KV had left the device: from COMPUTE, or the call, to the first token.",
}

_TOKENS_OF_CALLS = {
    "prompt_tokens": "Tokens of prompts.",
    "cached_tokens": "Tokens before the first computed one of a call: their KV was there, or shared.",
    "computed_tokens": "Tokens computed before the first generated one of a call.",
    "generated_tokens": "Generated tokens.",
    "guessed_tokens": "Tokens of guesses that steps have run.",
    "kept_tokens": "Tokens of guesses that were right.",
}
_TIMES_OF_CALLS = {
    "first_token": "From the receipt of a call to its first token, by model.",
    "whole": "From the receipt of a call to its end, by model.",
}


class DaemonMetrics:
    """Collects the metrics of a scrape."""

    def __init__(self, status: Status, sessions: SessionTable) -> None:
        self._status = status
        self._sessions = sessions

    async def text(self) -> bytes:
        """The metrics in Prometheus' text format, version 0.0.4."""
        report = await self._status.report()
        metrics = [
            *_of_server(self._status, report),
            *_of_principals(self._status.tenants()),
            *_of_calls(self._status),
            *(_of_engine(report) if report is not None else ()),
            *_of_latency(self._sessions.latency),
        ]
        return generate_latest(_Collected(metrics))


class _Collected(Collector):
    """Hands the collected metrics to prometheus_client."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Metric]:
        return self._metrics


def _of_server(status: Status, report: Report | None) -> Iterator[Metric]:
    sessions = Gauge("djinnd_sessions", "Open sessions.", labels=["class"])
    for priority, count in status.classes().items():
        sessions.add_metric([priority], count)
    yield sessions
    requests = Gauge("djinnd_requests", "Calls that have had a row in a step, or wait for one.", labels=["state"])
    for state, count in zip(("running", "queued"), status.requests(report), strict=True):
        requests.add_metric([state], count)
    yield requests
    yield Gauge("djinnd_engine_up", "1 if the engine is ready and answers, else 0.", value=report is not None)
    yield Counter("djinnd_engine_restarts", "Engines that were lost.", value=status.restarts)
    build = Gauge("djinnd_build_info", "1, with the version of the daemon.", labels=["version"])
    build.add_metric([__version__], 1)
    yield build


def _of_principals(tenants: list[TenantFigures]) -> Iterator[Metric]:
    """Metrics by principal. A Unix user and a token may have the same name, so only the number identifies a
    principal."""
    labels = ["principal", "name"]
    sessions = Gauge("djinnd_principal_sessions", "Sessions of a Unix user or of a token's name.", labels=labels)
    tokens = Counter("djinnd_principal_tokens", "Tokens computed for it: prompts, outputs, recomputed.", labels=labels)
    for tenant in tenants:
        sessions.add_metric([str(tenant.user), tenant.name], tenant.sessions)
        tokens.add_metric([str(tenant.user), tenant.name], tenant.tokens)
    yield from (sessions, tokens)


def _of_calls(status: Status) -> Iterator[Metric]:
    """Metrics of generations by model and principal, native and HTTP. They begin again if the model is forgotten."""
    labels = ["model", "principal", "name"]
    ended = Counter("djinnd_generations", "Generations that ended, by finish reason or error.", labels=[*labels, "end"])
    tokens = {field: Counter(f"djinnd_model_{field}", told, labels=labels) for field, told in _TOKENS_OF_CALLS.items()}
    times = {
        kind: HistogramMetricFamily(f"djinnd_model_{kind}_seconds", told, labels=["model"])
        for kind, told in _TIMES_OF_CALLS.items()
    }
    for model, calls in status.calls():
        for user, counts in calls.users.items():
            of = [model, str(user), status.name_of(user)]
            for reason, count in counts.ended.items():
                ended.add_metric([*of, reason], count)
            for field, family in tokens.items():
                family.add_metric(of, getattr(counts, field))
        for kind, histograms in times.items():
            histogram: Histogram = getattr(calls, kind)
            if histogram.count:
                histograms.add_metric([model], _buckets(histogram), histogram.total)
    yield from (ended, *tokens.values(), *times.values())


def _of_engine(report: Report) -> Iterator[Metric]:
    yield Gauge("djinnd_device_budget_bytes", "Device memory that the daemon may use.", value=report.budget_bytes)
    yield Gauge("djinnd_device_used_bytes", "Device memory that it has reserved.", value=report.used_bytes)
    yield Counter("djinnd_steps", "Steps that the engine has run.", value=report.steps)
    yield Counter("djinnd_generated_tokens", "Tokens that it has generated.", value=report.generated_tokens)
    copied = Counter("djinnd_bus_bytes", "Bytes that copies carried between host and device.", labels=["what"])
    for what, nbytes in report.copied.items():
        copied.add_metric([what], nbytes)
    yield copied
    pages = Gauge("djinnd_pages", "Pages that a tier has room for.", labels=["model", "tier"])
    used = Gauge("djinnd_pages_used", "Pages in use.", labels=["model", "tier"])
    page_bytes = Gauge("djinnd_page_bytes", "Size of a page.", labels=["model"])
    for model in report.models:
        page_bytes.add_metric([model.name], model.page_bytes)
        for tier, (there_are, are_used) in _tiers(model).items():
            pages.add_metric([model.name, tier], there_are)
            used.add_metric([model.name, tier], are_used)
    yield from (pages, used, page_bytes)


def _tiers(model: ModelInfo) -> dict[str, tuple[int, int]]:
    return {
        "device": (model.pages, model.pages_used),
        "host": (model.host_pages, model.host_pages_used),
        "disk": (model.disk_pages, model.disk_pages_used),
    }


def _of_latency(classes: Mapping[Class, Latencies]) -> Iterator[Metric]:
    for kind, told in _LATENCIES.items():
        family = HistogramMetricFamily(f"djinnd_{kind}_seconds", told, labels=["class"])
        for priority, latencies in classes.items():
            histogram: Histogram = getattr(latencies, kind)
            family.add_metric([priority], _buckets(histogram), histogram.total)
        yield family


def _buckets(histogram: Histogram) -> list[tuple[str, int]]:
    return [(_label(bound), count) for bound, count in histogram.below(_EVERY)]
