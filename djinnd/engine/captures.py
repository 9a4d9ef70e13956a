"""Activations that requests capture: on the device, from the steps that compute them until they are copied out.

Of a request, each point has `room` rows, side by side and in the order of its positions; steps fill those of all
requests together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from djinn_client.points import Point
from djinnd.device import Device
from djinnd.engine.device_rows import DeviceRows
from djinnd.engine.spans import Ints, Overlaps, Reach, SpanTable, sites_of


@dataclass(frozen=True, slots=True)
class _Captured:
    points: tuple[Point, ...]
    room: int
    rows: dict[bool, int]  # the first, of points that are logits and of others
    shifts: dict[Point, int]  # from there


class Captures:
    """Of one model. A request is here from its start until `close`."""

    def __init__(self, device: Device, model: str, width: int, vocab: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self._table = SpanTable()
        self._rows = {
            False: DeviceRows(device, f"captures of {model}", width, dtype),
            True: DeviceRows(device, f"captures of {model}'s logits", vocab, dtype),
        }
        self._captured: dict[int, _Captured] = {}

    def __len__(self) -> int:
        return len(self._captured)

    @property
    def nbytes(self) -> int:
        """Of the device's budget."""
        return sum(rows.nbytes for rows in self._rows.values())

    def into(self, *, of_logits: bool) -> Tensor:
        """[rows, width or vocab]: the rows that hits name."""
        return self._rows[of_logits].tensor

    def open(self, request: int, points: Sequence[Point], first: int, room: int) -> None:
        """Of positions [first, first + room). Raises OutOfMemory with the figures, and then has changed nothing."""
        assert request not in self._captured and points and room > 0
        of_kind = {kind: [p for p in points if (p.where == "logits") == kind] for kind in (False, True)}
        rows: dict[bool, int] = {}
        try:
            for kind, some in of_kind.items():
                if some:
                    rows[kind] = self._rows[kind].take(len(some) * room)
        except BaseException:
            for kind, row in rows.items():
                self._rows[kind].give_back(row, len(of_kind[kind]) * room)
            raise
        shifts = {point: index * room for some in of_kind.values() for index, point in enumerate(some)}
        self._captured[request] = _Captured(tuple(points), room, rows, shifts)
        sites = np.concatenate([sites_of(of_kind[kind], [shifts[p] for p in of_kind[kind]]) for kind in rows])
        sizes = [len(of_kind[kind]) for kind in rows]
        spans = [
            (first, first + room, row, 1, sum(sizes[:index]), sizes[index]) for index, row in enumerate(rows.values())
        ]
        self._table.set(request, np.array(spans, self._table.dtype), sites)

    def reach(self, requests: Sequence[int]) -> Reach | None:
        """See SpanTable.reach."""
        return self._table.reach(requests)

    def join(self, requests: Sequence[int], starts: Ints, counts: Ints) -> Overlaps:
        return self._table.join(requests, starts, counts)

    def offsets(self, request: int) -> list[int]:
        """Where each point begins in a window: one after another, `room` rows each; and the end of the last."""
        captured = self._captured[request]
        sizes = [captured.room * self._rows[point.where == "logits"].row_bytes for point in captured.points]
        return [0, *np.cumsum(sizes).tolist()]

    def rows_of(self, request: int, count: int) -> Iterator[Tensor]:
        """Of each point, the bytes of its first `count` rows, uint8: views, good until somebody else captures."""
        captured = self._captured[request]
        for point in captured.points:
            kind = point.where == "logits"
            first = captured.rows[kind] + captured.shifts[point]
            yield self._rows[kind].tensor[first : first + count].view(torch.uint8).flatten()

    def close(self, request: int) -> None:
        """Its rows are others'. One that is not here had none."""
        captured = self._captured.pop(request, None)
        if captured is None:
            return
        self._table.drop(request)
        for kind, row in captured.rows.items():
            count = sum((point.where == "logits") == kind for point in captured.points)
            self._rows[kind].give_back(row, count * captured.room)

    def release(self) -> None:
        """The device's memory; nothing is captured any more."""
        for rows in self._rows.values():
            rows.release()
        self._captured.clear()
