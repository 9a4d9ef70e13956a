"""The white-box table: its figures from results. Its measurements are run by hand."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tools.bench.whitebox.table import (
    dispatch,
    dispatch_anywhere,
    notes,
    peer,
    peers_table,
    scatter,
    steering_table,
    stops_table,
    summary,
)

EFFECT = {"differ": 0.25, "divergence": 0.0123, "change": 0.0039}


def calls(*turns: float) -> list[dict[str, float]]:
    return [{"step": 0.008 + turn / 5, "turn": turn} for turn in turns]


def stop(blocks: int) -> dict[str, Any]:
    return {
        "blocks": blocks,
        "accuracy": 1.0,
        "same_logprobs": True,
        "hit": [0.004],
        "resume": [0.009 / blocks],
        "beside": {"plain": calls(0.016, 0.0161, 0.03), "hit": calls(0.01615), "capture": calls(0.016, 0.0162)},
        "steered": {"0.9": EFFECT, "2": EFFECT},
        "edited": {"seconds": [0.05, 0.06], "tokens": [[1, 2], [3, 4]]},
    }


def found() -> dict[str, Any]:
    edited = {str(blocks): {"seconds": [0.1, 0.12], "tokens": [[1, 2], [3, 9]]} for blocks in (1, 2)}
    return {
        "device": "CPU",
        "dtype": "bfloat16",
        "blocks": 2,
        "scale": 0.9,
        "step": [0.008],
        "plain": [[1, 2], [3, 4]],
        "stops": [stop(1), stop(2)],
        "transformers": [[1, 2], [9, 4]],
        "peers": {
            "hooks": {"status": "measured", "note": "", "edited": edited},
            "nnsight": {"status": "skipped", "note": "nnsight is not installed", "edited": {}},
        },
    }


def test_dispatch_is_the_time_beyond_a_call_that_only_generates() -> None:
    assert dispatch(stop(1), "hit") == pytest.approx(5e-5) and dispatch(stop(1), "capture") == pytest.approx(0)
    assert dispatch(stop(1), "hit", "step") == pytest.approx(1e-5)


def test_dispatch_anywhere_compares_each_call_with_plain_calls_at_the_same_depth() -> None:
    one = found()
    one["stops"][0]["beside"] = {"plain": calls(0.010, 0.011, 0.030), "hit": calls(0.0111, 0.0112, 0.0113)}
    one["stops"][1]["beside"] = {"plain": calls(0.020, 0.021), "hit": calls(0.0209, 0.0210, 0.0216)}
    value, low, high = (seconds * 1e4 for seconds in msgspec.structs.astuple(dispatch_anywhere(one, "hit")))
    assert (value, low, high) == pytest.approx((3.5, 1.0, 11.0))


def test_the_scatter_covers_all_calls_that_only_generate() -> None:
    one = found()
    for stop in one["stops"]:
        stop["beside"]["plain"] = calls(0.016, 0.0162, 0.0164, 0.0166, 0.1)
    assert scatter(one) == pytest.approx(4e-4)


def test_a_peer_has_its_time_and_its_share_of_equal_tokens() -> None:
    one = found()
    assert peer(one, "hooks", one["stops"][0]) == "110.00 ms, 75%"
    assert peer(one, "nnsight", one["stops"][0]) == "skipped"
    assert notes(one) == "without an edit 75%; nnsight skipped: nnsight is not installed"


def test_a_failed_process_of_peers_is_reported() -> None:
    failed = {"status": "failed", "note": "killed by SIGKILL: without a word", "edited": {}}
    one = {**found(), "transformers": [], "peers": {"hooks": failed}}
    assert notes(one) == "hooks failed: killed by SIGKILL: without a word"
    assert list(peers_table(one).columns[-1].cells) == ["failed", "failed"]


def test_each_depth_has_a_line_in_each_table() -> None:
    one = found()
    rows = [[list(column.cells)[1] for column in table.columns] for table in (stops_table("m", one), peers_table(one))]
    assert rows[0][:3] == ["2", "100.0%, exact", "+0.05 ms (step +0.01)"] and rows[0][4:] == ["4.00 ms", "4.50 ms"]
    assert rows[1] == ["2", "55.00 ms", "110.00 ms, 75%", "skipped"]
    assert [list(column.cells) for column in steering_table(one).columns][1] == ["25%, 0.012 nats, 0.4%"] * 2
    one["stops"][1].update(accuracy=0.5, same_logprobs=False)
    assert list(stops_table("m", one).columns[1].cells) == ["100.0%, exact", "50.0%"]


def test_the_summary_has_every_model_and_its_bars() -> None:
    one = found()
    one["stops"][0].update(accuracy=0.5, same_logprobs=False)
    told = summary({"a": found(), "b": one})
    assert told.startswith("a: accuracy 100.0%, exact, dispatch of a hit +0.05 to +0.05 ms, wherever +0.050 ms ")
    assert "; b: accuracy 50.0%, dispatch" in told
    assert "restore 9.00 ms to 4.50 ms (of 10.20 ms), scaled behind 2 by 0.9 25%, 0.012 nats, 0.4%, by 2" in told
    assert told.endswith("stop, edit, go on there 55.00 ms, hooks 110.00 ms, 75%, nnsight skipped (" + notes(one) + ")")
    assert "|" not in told
