"""The white-box bench: its points, and its summary. Its measurements are run by hand."""

from __future__ import annotations

import pytest

from djinn_client.protocol import ModelInfo
from djinn_client.protocol.fields.points import PointMap
from tools.bench.whitebox.__main__ import WAYS, Calls, Captured, points_of, summary

POINTS = PointMap(blocks=8, width=64, vocab=512, layers="model.layers", attention="self_attn", mlp="mlp")
MODEL = ModelInfo(name="m", path="/m", blocks=8, points=POINTS)


@pytest.mark.parametrize(("way", "count"), [("plain", 0), ("one point", 1), ("all blocks", 8), ("attention", 1)])
def test_each_way_has_its_number_of_points(way: str, count: int) -> None:
    found = POINTS.resolve_all(points_of(MODEL, way))
    assert len(set(found.values())) == count
    assert {point.where for point in found.values()} <= ({"attn"} if way == "attention" else {"resid"})


def test_the_summary_has_the_figures() -> None:
    told = summary(
        {
            "prompt": 2048,
            "others": 32,
            "steered": 8,
            "bus": 55e9,
            "calls": Calls(0.0008, 0.007, 0.01)._asdict(),
            "captured": [Captured(40, 838_860_800, 0.1, 0.12)._asdict()],
            "beside": {way: {"rate": 1000.0, "lost": 0.013} for way in WAYS},
        }
    )
    assert told.startswith("8 sessions steered beside 32, which lose of their rate: one point +1.3%, all blocks +1.3%")
    assert "839 MB at 40 of the points of 2,048 tokens: 120.0 ms, 100.0 without (bus alone 15.3 ms)" in told
    assert told.endswith("an edit made and ended 0.80 ms, a token 7.00 ms, a capture of 8 tokens 10.00 ms")
