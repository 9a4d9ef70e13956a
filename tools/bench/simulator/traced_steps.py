"""The steps of a daemon, traced as long as a load lasts."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Self

import djinn_client as djinn

AT_ONCE = 100  # steps of a trace; while a trace is answered, no steps are traced for up to 45 ms
SECONDS = 2.0  # the longest trace
PAGES = ("pages up", "pages down")  # tracks of page copies


class Step(NamedTuple):
    rows: int
    further: int  # tokens beside the first of each row
    seconds: float  # until the next step begins, in a daemon that is always busy
    calls: int = 0  # calls heard meanwhile
    copied: int = 0  # bytes of page copies that begin meanwhile
    chunks: int = 0  # rows of more than one token


class TracedSteps:
    """Traces a daemon while its context lasts, and to the end of the last trace. A daemon allows one trace at a
    time."""

    def __init__(self, address: str) -> None:
        self.steps: list[Step] = []
        self._client = djinn.Client(address)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._trace, name="traced-steps", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()
        self._client.close()

    def _trace(self) -> None:
        while not self._stop.is_set():
            self.steps += steps_of(self._client.trace(steps=AT_ONCE, seconds=SECONDS).spans)


def steps_of(spans: Sequence[djinn.Span]) -> list[Step]:
    """All steps but the last one, because the begin of its successor is unknown."""
    steps = sorted((span for span in spans if span.track == "step"), key=_start)
    meanwhile: list[list[djinn.Span]] = [[] for _ in steps]
    for span in spans:
        if index := bisect_right(steps, span.start_us, key=_start):
            meanwhile[index - 1].append(span)
    found = []
    for (step, following), others in zip(pairwise(steps), meanwhile, strict=False):
        rows, tokens = int(step.args["rows"]), int(step.args["tokens"])
        calls = sum(int(span.args.get("calls", 0)) for span in others)
        copied = sum(int(span.args["bytes"]) for span in others if span.track in PAGES)
        seconds = (following.start_us - step.start_us) / 1e6
        found.append(Step(rows, tokens - rows, seconds, calls, copied, int(step.args["chunks"])))
    return found


def _start(span: djinn.Span) -> float:
    return span.start_us
