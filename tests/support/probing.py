"""A probe for tests, and edits written down plainly."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from djinn_client.edits import Op
from djinn_client.points import Point, PointMap

Change = Callable[[Tensor], None]  # of [tokens, width], in place


class Looking:
    """Keeps a copy of what it sees at `points`, and changes it before that at those of `changes`."""

    def __init__(self, points: Iterable[Point], changes: Mapping[Point, Change] | None = None) -> None:
        self.changes = dict(changes or {})
        self.points = frozenset(points) | frozenset(self.changes)
        self.seen: dict[Point, list[Tensor]] = defaultdict(list)  # [tokens, width], one each time
        self.order: list[Point] = []

    def at(self, point: Point, value: Tensor) -> None:
        assert value.dim() == 3 and len(value) == 1
        if point in self.changes:
            self.changes[point](value[0])
        self.seen[point].append(value[0].clone())
        self.order.append(point)


def all_points(points: PointMap) -> list[Point]:
    """Each once, in the order of computing."""
    return list(dict.fromkeys(points.resolve_all(points.names()).values()))


def edited(op: Op, row: Tensor, values: Tensor, scale: float = 1.0, low: float = 0.0, high: float = 0.0) -> Tensor:
    """row, values [width] → [width] of the row's dtype: one edit of one activation, by its formula."""
    a, v = row.float(), values.float()
    direction = v / v.norm()
    along = torch.dot(a, direction)
    match op:
        case "add":
            out = a + scale * v
        case "scale":
            out = a * scale
        case "project_out":
            out = a - scale * along * direction
        case "replace":
            out = v
        case "clamp":
            out = a + (along.clamp(low, high) - along) * direction
    return out.to(row.dtype)
