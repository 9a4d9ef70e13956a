from __future__ import annotations

import pytest

from djinn_client.protocol.fields.points import Point
from djinnd.core.stops import Stage, Stop, next_stop


@pytest.mark.parametrize(
    ("stops", "end", "stop"),
    [
        ((), 9, None),
        ((Stop(3, 4),), 4, None),
        ((Stop(3, 4),), 5, Stop(3, 4)),
        ((Stop(1, 6), Stop(3, 4)), 6, Stop(3, 4)),
        ((Stop(1, 6), Stop(3, 4)), 7, Stop(1, 4)),
        ((Stop(0, 2), Stop(3, 5)), 9, Stop(0, 2)),
    ],
)
def test_positions_from_the_first_named_one_on_stop_before_the_first_block(
    stops: tuple[Stop, ...], end: int, stop: Stop | None
) -> None:
    assert next_stop(stops, end) == stop


@pytest.mark.parametrize(
    ("point", "stands"),
    [
        (Point("resid", 2), True),
        (Point("resid", 1), False),
        (Point("attn", 2), True),
        (Point("mlp", 1), False),
        (Point("norm"), True),
        (Point("logits"), True),
    ],
)
def test_a_stage_stands_if_the_edit_s_point_is_ahead(point: Point, stands: bool) -> None:
    assert Stage(first=2, last=5, done=0).stands([Point("resid", 3), point]) is stands
