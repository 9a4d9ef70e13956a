"""A probe that records activations."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from djinn_client.protocol.fields.points import Point, PointMap

Change = Callable[[Tensor], None]  # changes [tokens, width] in place


class Looking:
    """Applies `changes`, and then keeps a copy of the activation at each of `points`."""

    def __init__(self, points: Iterable[Point], changes: Mapping[Point, Change] | None = None) -> None:
        self.changes = dict(changes or {})
        self.first = 0
        self.points = frozenset(points) | frozenset(self.changes)
        self.seen: dict[Point, list[Tensor]] = defaultdict(list)  # [tokens, width] for each call
        self.order: list[Point] = []

    def at(self, point: Point, value: Tensor) -> None:
        assert value.dim() == 3 and len(value) == 1
        if point in self.changes:
            self.changes[point](value[0])
        self.seen[point].append(value[0].clone())
        self.order.append(point)


def all_points(points: PointMap) -> list[Point]:
    """All points, in the order of computation."""
    return list(dict.fromkeys(points.resolve_all(points.names()).values()))
