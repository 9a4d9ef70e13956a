"""The bench of resuming inside the model: its depths, and its table. Its measurements are run by hand."""

from __future__ import annotations

from typing import Any

import click
import pytest

from djinn_client.protocol import Span
from tools.bench.whitebox.resume_inside import block_counts, depths, only_behind, summary, table


@pytest.mark.parametrize(
    ("blocks", "at"),
    [(40, [1, 10, 20, 30, 40]), (32, [1, 8, 16, 24, 32]), (8, [1, 2, 4, 6, 8]), (4, [1, 2, 3, 4]), (1, [1])],
)
def test_the_default_depths_scale_with_the_model(blocks: int, at: list[int]) -> None:
    assert depths(blocks, []) == at


def test_a_depth_that_the_model_does_not_have_is_refused() -> None:
    assert depths(8, [8, 3, 3]) == [3, 8]
    for wanted in ([0], [9]):
        with pytest.raises(click.BadParameter, match="1 to 8"):
            depths(8, wanted)


def span(track: str, name: str) -> Span:
    return Span(track, name, 0.0, 1.0)


def test_blocks_are_counted_where_they_compute() -> None:
    step = [span("compute", name) for name in ("prologue", "block 2", "block 3", "epilogue")]
    assert block_counts([*step, span("copy", "block 1"), *step], 4) == [0, 0, 2, 2]


@pytest.mark.parametrize(
    ("counts", "depth", "right"),
    [
        ([0, 0, 2, 2], 2, True),
        ([0, 0, 0, 0], 4, True),
        ([0, 1, 2, 2], 2, False),  # one block ran twice
        ([0, 0, 2, 1], 2, False),
        ([0, 0, 0, 0], 2, False),  # no block was seen
        ([0, 0, 0, 1], 4, False),
    ],
)
def test_all_blocks_behind_the_stop_must_run_and_no_others(counts: list[int], depth: int, right: bool) -> None:
    assert only_behind(counts, depth) is right


def found(back: tuple[int, ...] = (0, 0, 1, 1)) -> dict[str, Any]:
    def stop(blocks: int, seconds: float, ran: list[int]) -> dict[str, Any]:
        times = [{"seconds": seconds, "daemon": seconds / 2}] * 3
        peers = {"manual": [0.02], "recompute": [0.09], "nnsight": [0.11], "nnsight_note": ""}
        return {"blocks": blocks, "djinnd": times, "ran": ran, **peers}

    return {
        "device": "CPU",
        "bus": 1e10,
        "tokens": 2048,
        "blocks": 4,
        "recompute": [{"seconds": 0.1, "daemon": 0.1}],
        "from_host": {
            "blocks": 2,
            "stayed": [{"seconds": 0.05}],
            "back": [{"seconds": 0.06, "nbytes": 1e8}],
            "ran": list(back),
        },
        "stops": [stop(1, 0.08, [0, 1, 1, 1]), stop(2, 0.05, [0, 0, 1, 1]), stop(4, 0.03, [1, 1, 1, 1])],
    }


def test_the_summary_has_shares_bars_and_blocks() -> None:
    assert summary(found()) == (
        "2,048 tokens, 4 blocks, until the next token: recompute 100.0 ms; "
        "behind 1 80.0 ms, 0.80, blocks run 0.75, manual 20.0 ms, hooks 90.0 ms, nnsight 110.0 ms; "
        "behind 2 50.0 ms, 0.50 (of 0.55), blocks run 0.50, manual 20.0 ms, hooks 90.0 ms, nnsight 110.0 ms; "
        "behind 4 30.0 ms, 0.30 (of 0.10), blocks run not those behind alone: [1, 1, 1, 1], manual 20.0 ms, "
        "hooks 90.0 ms, nnsight 110.0 ms; behind 2 from the host 10.0 ms more (of 12.0 ms)"
    )


def test_recomputed_pages_are_mentioned() -> None:
    assert summary(found(back=(1, 1, 1, 1))).endswith("(of 12.0 ms), computed anew: [1, 1, 1, 1]")


def test_missing_nnsight_leaves_its_column_empty_and_the_reason_below() -> None:
    skipped = found()
    for stop in skipped["stops"]:
        stop.update(nnsight=[], nnsight_note="nnsight is not installed")
    shown = table("m", skipped)
    assert list(shown.columns[-1].cells) == ["", "", ""] and list(shown.columns[-2].cells) == ["90.0"] * 3
    assert str(shown.caption).endswith("nnsight skipped: nnsight is not installed")
    assert "nnsight" not in summary(skipped)
