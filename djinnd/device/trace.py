"""Records when a device did its work: spans on named tracks, each between two stamps.

    step        │ step                                        │ step
    compute     │ prologue │ block 0 │   │ block 1 │ epilogue │
    host                                                       │ messages │ compose │
    cpu                        │ MLP of 1 rows │                          inside of a block's span
    copy        │ block 2 │ block 2 │ block 1 │ block 1 │ …          a span a piece
    pages up         │ promote 16 │                                  a span a copy of neighbouring pages
    pages down                 │ demote 8 │ demote 3 │

A stamp is queued like other work. It gets its time when its stream passes it, so recording blocks nothing. Times are
read when the trace has ended, in parts, because each read takes some microseconds. Spans of one track do not overlap.
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
        """Microseconds from `earlier` to this stamp, negative if `earlier` was passed later. Both have been passed."""


class _Recorded(NamedTuple):
    track: str
    name: str
    began: Stamp
    ended: Stamp
    args: dict[str, Any]


class DeviceTrace:
    """Spans that one thread begins and ends, and copies, which any thread may add."""

    def __init__(self, stamp: Callable[[], Stamp]) -> None:
        """`stamp`: makes a stamp at the current end of the compute stream."""
        self._stamp = stamp
        self._open: dict[str, tuple[str, Stamp, dict[str, Any]]] = {}  # by track
        self._recorded: list[_Recorded] = []
        # start since the first span began, and duration, in µs; of the first spans of `_recorded`
        self._times: list[tuple[float, float]] = []

    def begin(self, track: str, name: str, **args: Any) -> None:
        """Begins a span. An open span of the same track is dropped: its work failed before the span ended."""
        self._open[track] = (name, self._stamp(), args)

    def end(self, track: str) -> None:
        name, began, args = self._open.pop(track)
        self.add(track, name, began, self._stamp(), **args)

    def add(self, track: str, name: str, began: Stamp, ended: Stamp, **args: Any) -> None:
        self._recorded.append(_Recorded(track, name, began, ended, args))

    def read(self, most: int) -> int:
        """Reads the times of up to `most` ended spans, as far as the device has passed them. → the number read."""
        known = len(self._times)
        for span in self._recorded[known : known + most]:
            if not span.ended.passed:
                break
            self._times.append((span.began.since(self._recorded[0].began), span.ended.since(span.began)))
        return len(self._times) - known

    @property
    def is_read(self) -> bool:
        """True if the times of all ended spans have been read."""
        return len(self._times) == len(self._recorded)

    def spans(self) -> list[Span]:
        """The ended spans, in the order in which they began; the first begins at 0. All times must have been read."""
        assert self.is_read
        first = min((start for start, _ in self._times), default=0.0)
        spans = [
            Span(span.track, span.name, start - first, seconds, span.args)
            for span, (start, seconds) in zip(self._recorded, self._times, strict=True)
        ]
        return sorted(spans, key=lambda span: span.start_us)
