"""What a device did when: spans on named tracks, each between two stamps.

    step        │ step                                        │ step
    compute     │ prologue │ block 0 │   │ block 1 │ epilogue │
    host                                                       │ messages │ compose │
    copy        │ block 2 │ block 2 │ block 1 │ block 1 │ …          a span a piece
    pages up         │ promote 16 │                                  a span a copy of neighbouring pages
    pages down                 │ demote 8 │ demote 3 │

A stamp is queued like work and has its time when its stream has passed it: recording makes nobody wait. Times are read
when the trace has ended, a part at a time, as each takes some microseconds. On a track one span follows another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from djinn_client.protocol import Span


class Stamp(Protocol):
    """A point in a stream of the device."""

    @property
    def passed(self) -> bool: ...

    def since(self, earlier: Any) -> float:
        """Microseconds from another stamp of the device, which may be later; both have been passed."""


class _Recorded(NamedTuple):
    track: str
    name: str
    began: Stamp
    ended: Stamp
    args: dict[str, Any]


class Trace:
    """Spans that a thread begins and ends, and copies, which any thread may add."""

    def __init__(self, stamp: Callable[[], Stamp]) -> None:
        """`stamp`: where the compute stream is now."""
        self._stamp = stamp
        self._open: dict[str, tuple[str, Stamp, dict[str, Any]]] = {}  # by track
        self._recorded: list[_Recorded] = []
        self._times: list[tuple[float, float]] = []  # of the first of these: since the first began; how long they took

    def begin(self, track: str, name: str, **args: Any) -> None:
        """A span of the track that was begun before and never ended, because its work failed, is forgotten."""
        self._open[track] = (name, self._stamp(), args)

    def end(self, track: str) -> None:
        name, began, args = self._open.pop(track)
        self.add(track, name, began, self._stamp(), **args)

    def add(self, track: str, name: str, began: Stamp, ended: Stamp, **args: Any) -> None:
        self._recorded.append(_Recorded(track, name, began, ended, args))

    def read(self, most: int) -> int:
        """The times of so many of those that were ended, at most, and as far as they have been passed. → how many."""
        known = len(self._times)
        for span in self._recorded[known : known + most]:
            if not span.ended.passed:
                break
            self._times.append((span.began.since(self._recorded[0].began), span.ended.since(span.began)))
        return len(self._times) - known

    @property
    def is_read(self) -> bool:
        """All of it."""
        return len(self._times) == len(self._recorded)

    def spans(self) -> list[Span]:
        """Those that were ended, in the order in which they began; the first begins at 0. All have been read."""
        assert self.is_read
        first = min((start for start, _ in self._times), default=0.0)
        spans = [
            Span(span.track, span.name, start - first, seconds, span.args)
            for span, (start, seconds) in zip(self._recorded, self._times, strict=True)
        ]
        return sorted(spans, key=lambda span: span.start_us)
