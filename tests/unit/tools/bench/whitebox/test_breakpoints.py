"""The bench of breakpoints: the points that it reads, and its table. Its measurements are run by hand."""

from __future__ import annotations

from typing import Any

import pytest

from djinn_client.protocol import ModelInfo
from djinn_client.protocol.fields.points import PointMap
from tools.bench.whitebox.breakpoint_measures import middle, to_read
from tools.bench.whitebox.breakpoints import lines, summary

MB = 1_000_000


def model(blocks: int = 8, width: int = 64, max_context: int = 2048, dtype: str = "bfloat16") -> ModelInfo:
    points = PointMap(blocks=blocks, width=width, vocab=512)
    return ModelInfo(name="m", path="/m", blocks=blocks, points=points, max_context=max_context, dtype=dtype)


def found() -> dict[str, Any]:
    return {
        "others": 32,
        "stopping": {
            "plain": [0.010, 0.011, 0.012],
            "run": [0.006],
            "resume": [0.005],
            "cost": [4e-4],
            "client": [3e-4],
        },
        "restoring": {"resume": [0.008], "call": [0.0075], "step": [0.007, 0.007]},
        "reading": {"points": 4, "positions": 1600, "nbytes": 64 * MB, "first": [0.010, 0.030, 0.011], "plain": [0.01]},
        "beside": {"idle": [100.0] * 3, "stopped": [99.0] * 3, "lost": [0.02, -0.01, 0.004]},
    }


@pytest.mark.parametrize(("blocks", "block"), [(1, 0), (8, 3), (9, 3), (40, 19)])
def test_half_of_the_blocks_run_before_the_middle(blocks: int, block: int) -> None:
    assert middle(model(blocks)) == block


@pytest.mark.parametrize(
    ("info", "points", "positions"),
    [
        (model(32, 4096, 8193), 1, 7813),  # one point has room, as in a hit
        (model(40, 5120, 4096), 2, 3125),
        (model(8, 192, 2048, "float32"), 8, 2047),  # all points and positions
    ],
)
def test_reading_uses_the_fewest_points_with_enough_bytes(info: ModelInfo, points: int, positions: int) -> None:
    names, length = to_read(info, 64 * MB)
    assert (len(names), length) == (points, positions)
    assert names[-1] == f"blocks.{info.blocks - 1}.hook_resid_post" and len(set(names)) == len(names)


def test_each_figure_of_breakpoints_has_its_bar_beside_it() -> None:
    told = {line.measure: line[1:] for line in lines(found())}
    assert told["cost of stopping"] == ("p50 0.40 ms, p99 0.40 ms", "p50 1 ms")
    assert told["of it, the client's"] == ("p50 0.30 ms, p99 0.30 ms", "")
    assert told["generate of as many tokens"] == ("p50 11.00 ms, p99 11.98 ms", "")
    assert told["resume of a decode row"] == ("p50 8.00 ms, p99 8.00 ms", "p50 9.20 ms")  # a step, and 2.2
    assert told["reading 64 MB at 4 of the points"] == ("11.00 ms", "11.00 ms")
    assert told["rate that 32 others lose"] == ("+0.4% (-1.0% to +2.0%)", "1.0%")


def test_the_summary_has_all_figures_of_the_table() -> None:
    told = summary(found())
    assert "cost of stopping p50 0.40 ms, p99 0.40 ms (of p50 1 ms); of it, the client's p50 0.30 ms" in told
    assert told.endswith("rate that 32 others lose +0.4% (-1.0% to +2.0%) (of 1.0%)") and "|" not in told
