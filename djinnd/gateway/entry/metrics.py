"""Figures of the gateway's requests for Prometheus, under the names of vLLM's server.

Dashboards and autoscalers know those names. The daemon's own metrics come from its socket (`metrics` in the
configuration) and follow in the same answer.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from djinn_client.protocol import Generated, StatusReply

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
PATIENCE = 10.0  # seconds that the daemon's socket may take
MOST_BYTES = 16 << 20  # of its answer
MAX_MODELS = 128  # names of models that become labels; the outputs of all others count as "other"
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class Metrics:
    """`socket`: the path of the daemon's metrics; "": there is none. `others`: further figures of the gateway."""

    def __init__(self, socket: str, *others: Collector) -> None:
        self._socket = socket
        self._models: set[str] = set()
        self._registry = own = CollectorRegistry()
        for each in others:
            own.register(each)
        model = ["model_name"]
        self.requests = Gauge("djinnd_http_requests_running", "HTTP requests that are being answered.", registry=own)
        self._ended = Counter("djinnd_http_requests", "HTTP requests that ended.", ["path", "status"], registry=own)
        self._running = Gauge("vllm:num_requests_running", "Calls of the daemon with a row in a step.", registry=own)
        self._waiting = Gauge("vllm:num_requests_waiting", "Calls of the daemon that wait for a row.", registry=own)
        self._pages = Gauge("vllm:kv_cache_usage_perc", "Used part of a model's pages, 0 to 1.", model, registry=own)
        self._prompt = Counter("vllm:prompt_tokens", "Tokens of prompts.", model, registry=own)
        self._generated = Counter("vllm:generation_tokens", "Generated tokens.", model, registry=own)
        self._success = Counter("vllm:request_success", "Whole outputs.", [*model, "finished_reason"], registry=own)
        self._queued = self._seconds("vllm:request_queue_time_seconds", "From a call to its first row.")
        self._first = self._seconds("vllm:time_to_first_token_seconds", "From a call to its first token.")
        self._whole = self._seconds("vllm:e2e_request_latency_seconds", "From a call to its end.")
        self._between = self._seconds(
            "vllm:inter_token_latency_seconds", "Between an output's tokens, in the mean.", _TOKEN_SECONDS
        )

    def ended(self, path: str, status: int) -> None:
        self._ended.labels(path, str(status)).inc()

    def output(self, model: str, reply: Generated) -> None:
        """Counts an output of a model. Its times are the daemon's."""
        name = self._label(model)
        usage, timings = reply.usage, reply.timings
        self._prompt.labels(name).inc(usage.prompt_tokens)
        self._generated.labels(name).inc(usage.generated_tokens)
        if reply.finish_reason not in ("length", "stop"):
            return
        self._success.labels(name, reply.finish_reason).inc()
        self._queued.labels(name).observe(timings.queued)
        self._whole.labels(name).observe(timings.total)
        if usage.generated_tokens:
            self._first.labels(name).observe(timings.first_token)
        if usage.generated_tokens > 1:
            self._between.labels(name).observe((timings.total - timings.first_token) / (usage.generated_tokens - 1))

    def daemon(self, status: StatusReply) -> None:
        """Takes over the gauges of the whole daemon, native clients included."""
        self._running.set(status.requests_running)
        self._waiting.set(status.requests_queued)
        self._pages.clear()
        for model in status.models:
            if model.pages:
                self._pages.labels(self._label(model.name)).set(model.pages_used / model.pages)

    def _seconds(self, name: str, told: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
        return Histogram(name, told, ["model_name"], buckets=buckets, registry=self._registry)

    def _label(self, model: str) -> str:
        if len(self._models) < MAX_MODELS:
            self._models.add(model)
        return model if model in self._models else "other"

    async def text(self) -> bytes:
        return generate_latest(self._registry) + await self._of_daemon()

    async def _of_daemon(self) -> bytes:
        """The daemon's own; b"" where its socket does not answer."""
        if not self._socket:
            return b""
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(PATIENCE):
                reader, writer = await asyncio.open_unix_connection(self._socket)
                try:
                    writer.write(b"GET /metrics HTTP/1.0\r\n\r\n")
                    answer = b""
                    while len(answer) < MOST_BYTES and (part := await reader.read(65536)):
                        answer += part
                finally:
                    writer.close()
                head, _, body = answer.partition(b"\r\n\r\n")
                return body if b" 200 " in head[:20] else b""
        return b""
