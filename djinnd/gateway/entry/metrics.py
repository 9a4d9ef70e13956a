"""What the gateway counts of its requests, under vLLM's names, for Prometheus.

The daemon's own metrics come from its socket (`metrics` in the configuration) and follow in the same answer.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

CONTENT_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
PATIENCE = 10.0  # seconds that the daemon's socket may take
MOST_BYTES = 16 << 20  # of its answer
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 150.0, 600.0)


class Metrics:
    """`socket`: the path of the daemon's metrics; "": there is none."""

    def __init__(self, socket: str) -> None:
        self._socket = socket
        self._registry = CollectorRegistry()
        own = self._registry
        self.running = Gauge("vllm:num_requests_running", "HTTP requests that are being answered.", registry=own)
        self._prompt = Counter("vllm:prompt_tokens", "Tokens of prompts that came over HTTP.", registry=own)
        self._generated = Counter("vllm:generation_tokens", "Tokens generated for HTTP requests.", registry=own)
        self._ended = Counter("djinnd_http_requests", "HTTP requests that ended.", ["path", "status"], registry=own)
        self._success = Counter("vllm:request_success", "Outputs that were answered with 200.", registry=own)
        self._first = Histogram(
            "vllm:time_to_first_token_seconds", "To a stream's first event.", buckets=_SECONDS, registry=own
        )
        self._whole = Histogram(
            "vllm:e2e_request_latency_seconds", "From a request's headers to its end.", buckets=_SECONDS, registry=own
        )

    def began_stream(self, seconds: float) -> None:
        self._first.observe(seconds)

    def ended(self, path: str, status: int, seconds: float, prompt_tokens: int, generated_tokens: int) -> None:
        self._ended.labels(path, str(status)).inc()
        if not generated_tokens:
            return
        self._prompt.inc(prompt_tokens)
        self._generated.inc(generated_tokens)
        self._whole.observe(seconds)
        if status == 200:
            self._success.inc()

    async def text(self) -> bytes:
        return generate_latest(self._registry) + await self._of_daemon()

    async def _of_daemon(self) -> bytes:
        """b"" where it does not answer: the gateway's own are told in any case."""
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
