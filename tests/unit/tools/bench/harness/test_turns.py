from __future__ import annotations

from functools import partial

from tools.bench.harness.turns import in_turns


def test_each_way_is_measured_once_a_round_and_each_round_begins_with_the_next_way() -> None:
    order: list[str] = []

    def measure(way: str) -> int:
        order.append(way)
        return len(order)

    found = in_turns({way: partial(measure, way) for way in "abc"}, 3, lambda number: order.append(str(number)))
    assert "".join(order) == "1abc2bca3cab"
    assert found == {"a": [2, 8, 11], "b": [3, 6, 12], "c": [4, 7, 10]}
