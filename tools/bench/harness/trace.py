"""Spans of the daemon's trace while a bench does something."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import djinn_client as djinn
from djinn_client.protocol import Span


@contextmanager
def traced(address: str, seconds: float) -> Iterator[Callable[[], list[Span]]]:
    """Traces so many seconds, or 100 steps, and gives a function that waits for the spans."""
    with djinn.Client(address) as client, ThreadPoolExecutor(1) as thread:
        client.ping()
        spans = thread.submit(client.trace, steps=100, seconds=seconds)
        time.sleep(0.05)  # until the engine knows
        yield lambda: spans.result().spans
