"""Traces of the scripted engine: like a real engine, it has one at a time. Each step is a span, without times."""

from __future__ import annotations

import time

from djinn_client.protocol import Span
from djinnd import messages
from tests.support.scripted_engine.channel import Channel


class Tracing:
    """A trace ends by steps or by time."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._trace: messages.Trace | None = None
        self._spans: list[Span] = []
        self._until = 0.0

    def on_trace(self, message: messages.Trace) -> None:
        if self._trace is not None:
            self._channel.fail(message.request, "retry", "another trace is being recorded")
            return
        self._trace, self._spans, self._until = message, [], time.monotonic() + message.seconds

    def note_step(self) -> None:
        if self._trace is not None:
            self._spans.append(Span("step", "step", 1e3 * len(self._spans), 1e3))

    def turn(self) -> None:
        """Sends the trace if it has ended."""
        trace = self._trace
        if trace is not None and (len(self._spans) == trace.steps or time.monotonic() >= self._until):
            self._channel.send(messages.Traced(trace.request, self._spans))
            self._trace = None
