"""Activations that requests capture: kept on the device from the step that computes them until they are copied out.

Each point of a request has `room` contiguous rows, in the order of positions. Steps write rows of all requests
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from djinn_client.protocol.fields.points import Point
from djinnd.device import Device
from djinnd.engine.probes.device_rows import DeviceRows
from djinnd.engine.probes.spans import (
    SPAN,
    Ints,
    Overlaps,
    PointReach,
    Records,
    SpanTable,
    kinds_of,
    reach_of,
    sites_of,
)
from djinnd.engine.tuning import ROWS_AT_HAND


class _Layout(NamedTuple):
    """Properties of a tuple of points that do not depend on the request."""

    of_kind: dict[bool, list[Point]]
    reach: PointReach


@lru_cache(256)  # computed between two steps, and the same points are captured again and again
def _layout_of(points: tuple[Point, ...]) -> _Layout:
    return _Layout(kinds_of(points), reach_of(points))


class _Captured(msgspec.Struct, frozen=True):
    points: tuple[Point, ...]
    first: int  # position
    room: int
    rows: dict[bool, int]  # the first row, of points that are logits and of the others
    shifts: dict[Point, int]  # of each point, from that row
    reach: PointReach

    def spans(self) -> tuple[Records, Records]:
        """Spans and sites, for a SpanTable."""
        of_kind = _layout_of(self.points).of_kind
        sites = [sites_of(some, [self.shifts[point] for point in some]) for some in of_kind.values()]
        ends = np.cumsum([len(some) for some in of_kind.values()])
        spans = [
            (self.first, self.first + self.room, row, 1, end - len(some), len(some))
            for row, some, end in zip(self.rows.values(), of_kind.values(), ends, strict=True)
        ]
        return np.array(spans, SPAN), np.concatenate(sites)


def _views(captured: _Captured, tensors: Mapping[bool, Tensor], count: int) -> Iterator[Tensor]:
    for point in captured.points:
        kind = point.where == "logits"
        first = captured.rows[kind] + captured.shifts[point]
        yield tensors[kind][first : first + count].view(torch.uint8).flatten()


class Captures:
    """The captures of one model. A request is in here from `open` until `close`."""

    def __init__(self, device: Device, model: str, width: int, vocab: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._table = SpanTable()
        self._rows = {
            False: DeviceRows(device, f"captures of {model}", width, dtype, ROWS_AT_HAND),
            True: DeviceRows(device, f"captures of {model}'s logits", vocab, dtype),
        }
        self._captured: dict[int, _Captured] = {}

    def __len__(self) -> int:
        return len(self._captured)

    def __contains__(self, request: int) -> bool:
        return request in self._captured

    @property
    def nbytes(self) -> int:
        """Bytes of the device's budget."""
        return sum(rows.nbytes for rows in self._rows.values())

    def into(self, *, of_logits: bool) -> Tensor:
        """[rows, width or vocab]: `row` of a hit is a row of this tensor."""
        return self._rows[of_logits].tensor

    def open(self, request: int, points: tuple[Point, ...], first: int, room: int) -> None:
        """Reserves rows for positions [first, first + room). Raises OutOfMemory with the figures; nothing has changed
        then."""
        assert request not in self._captured and points and room > 0
        of_kind, reach = _layout_of(points)
        rows: dict[bool, int] = {}
        try:
            for kind, some in of_kind.items():
                rows[kind] = self._rows[kind].take(len(some) * room)
        except BaseException:
            for kind, row in rows.items():
                self._rows[kind].give_back(row, len(of_kind[kind]) * room)
            raise
        shifts = {point: index * room for some in of_kind.values() for index, point in enumerate(some)}
        self._captured[request] = _Captured(points, first, room, rows, shifts, reach)

    def reaches(self, requests: Sequence[int]) -> dict[int, PointReach]:
        """The reach of each of these requests that captures."""
        captured = self._captured
        return {request: captured[request].reach for request in requests if request in captured}

    def join(self, requests: Sequence[int], starts: Ints, counts: Ints) -> Overlaps:
        """Finds the captures that overlap a batch with these rows."""
        for request in self._captured.keys() & requests:
            if request not in self._table:
                self._table.set(request, *self._captured[request].spans())
        return self._table.join(requests, starts, counts)

    def offsets(self, request: int) -> list[int]:
        """Byte offset of each point in a window, and the window's size: `room` rows for each point, one point after
        another."""
        captured = self._captured[request]
        sizes = (captured.room * self._rows[point.where == "logits"].row_bytes for point in captured.points)
        return list(accumulate(sizes, initial=0))

    def rows_of(self, request: int, count: int) -> Iterator[Tensor]:
        """For each point, its first `count` rows as bytes: uint8 views into the current tensor, which later captures do
        not change."""
        captured = self._captured[request]
        return _views(captured, {kind: self._rows[kind].tensor for kind in captured.rows}, count)

    def close(self, request: int) -> None:
        """Frees the request's rows. Does nothing for a request that is not in here."""
        captured = self._captured.pop(request, None)
        if captured is None:
            return
        self._table.drop(request)
        for kind, some in _layout_of(captured.points).of_kind.items():
            self._rows[kind].give_back(captured.rows[kind], len(some) * captured.room)

    def release(self) -> None:
        """Frees the device memory; all captures are lost."""
        for rows in self._rows.values():
            rows.release()
        self._captured.clear()
