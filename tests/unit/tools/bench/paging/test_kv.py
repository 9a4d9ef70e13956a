from __future__ import annotations

from typing import Any

import click
import pytest

from djinn_client.protocol import Span
from tools.bench.paging.beside import DECODERS, noticed
from tools.bench.paging.kv import chosen, lines, summary
from tools.bench.paging.kv_measures import copied

COPIES = {"rate": 50e9, "traced_rate": None}


def woken(seconds: float, computed: int = 1) -> dict[str, Any]:
    return {"seconds": seconds, "nbytes": 1_000_000_000, "computed": computed}


def moved(seconds: float, up: float, down: float) -> dict[str, float]:
    return {"seconds": seconds, "bytes_up": up, "bytes_down": down}


def found() -> dict[str, Any]:
    return {
        "tokens": 2048,
        "session_bytes": 1_000_000_000,
        "step_s": 0.010,
        "ceilings": {"up": 50e9, "down": 40e9, "both": 25e9, "disk": {"read": 5e9, "write": 2e9, "direct": True}},
        "demote": COPIES | {"rate": 30e9, "traced_rate": 38e9},
        "promote": COPIES,
        "exchange_down": COPIES,
        "exchange_up": COPIES,
        "stayed": [woken(0.011)],
        "from_host": [woken(0.030), woken(0.031), woken(0.060)],
        "when_expected": [woken(0.011)],
        "to_disk": {"rate": 1e9, "traced_rate": None},
        "from_disk": [woken(0.080, 2048), woken(0.200)],
        "recomputed": [woken(0.090, 2049)],
        "beside": {
            "undisturbed": {"median": 0.010, "p99": 0.011, "step_median": 0.009, "idle_p99": 0.0003},
            "each_second": {"median": 0.0102, "p99": 0.022, "step_median": 0.009, "idle_p99": 0.002}
            | moved(2.0, 2e9, 3e9),
            "disturbed": {"median": 0.011, "p99": 0.011, "step_median": 0.0093, "idle_p99": 0.0004}
            | moved(1.0, 20e9, 20e9),
        },
        "forks": {"seconds": [0.0005], "many": 1000, "pages_of_many": 1000},
    }


def test_each_figure_has_its_bar_beside_it() -> None:
    told = {line.measure: line[1:] for line in lines(found())}
    assert told["demote"] == ("30.0 GB/s", "40.0 GB/s", "0.75")
    assert told["demote, the copies alone"] == ("38.0 GB/s", "40.0 GB/s", "0.95")
    assert "promote, the copies alone" not in told
    assert told["promote as another leaves"] == ("50.0 GB/s", "25.0 GB/s", "2.00")
    assert told["token of one on the host (copied)"] == ("31.00 ms", "32.00 ms", "0.97")  # 20 by the bus, a step, 2
    assert told["the same, expected (copied)"] == ("11.00 ms", "12.00 ms", "0.92")
    assert told["others' step, a session a second, median"] == ("10.20 ms", "1.05 x 10.00 ms", "1.020")
    assert told["others' step, a session a second, p99"] == ("22.00 ms", "1.15 x 11.00 ms", "2.000")
    assert told["of that outside of blocks, a session a second, p99"] == ("2.00 ms", "0.30 ms", "")
    assert told["up meanwhile, a session a second"] == ("1.0 GB/s", "25.0 GB/s", "0.04")
    assert told["down meanwhile, a session a second"] == ("1.5 GB/s", "25.0 GB/s", "0.06")
    assert told["others' step, as many as the bus takes, median"] == ("11.00 ms", "1.05 x 10.00 ms", "1.100")
    assert told["of that the device's, as many as the bus takes, median"] == ("9.30 ms", "9.00 ms", "1.033")
    assert told["up meanwhile, as many as the bus takes"] == ("20.0 GB/s", "25.0 GB/s", "0.80")
    assert told["pages of 1,000 forks"] == ("1,000", "1,000", "")


def test_the_bar_of_a_token_from_disk_is_the_faster_of_reading_and_recomputing() -> None:
    told = {line.measure: line for line in lines(found())}
    assert told["token of one on disk (1 of 2 copied)"].bar == "90.00 ms"
    slow = found() | {"recomputed": [woken(1.0, 2049)]}
    assert {line.measure: line for line in lines(slow)}["token of one on disk (1 of 2 copied)"].bar == "262.00 ms"


@pytest.mark.parametrize(("computed", "word"), [([1, 1], "copied"), ([7, 9], "computed"), ([1, 9], "1 of 2 copied")])
def test_the_table_tells_whether_the_daemon_copied_or_recomputed(computed: list[int], word: str) -> None:
    assert chosen([woken(0.1, tokens) for tokens in computed]) == word


def test_the_summary_is_one_line_that_fits_a_table() -> None:
    told = summary(found())
    assert told.startswith("2,048 tokens, 1.00 GB: demote 30.0 GB/s (of 40.0 GB/s); ")
    assert "|" not in told and "\n" not in told


def test_the_time_of_copies_is_from_the_first_start_to_the_last_end() -> None:
    spans = [
        Span("step", "step", 0.0, 9e9),
        Span("pages up", "promote 4", 1e6, 2e6, {"bytes": 400}),
        Span("pages down", "demote 8", 1e6, 5e6, {"bytes": 800}),
        Span("pages up", "promote 2", 4e6, 1e6, {"bytes": 200}),
    ]
    up = copied(600, 5.0, spans, "promote")
    assert (up.rate, up.traced_bytes, up.traced_seconds, up.traced_rate) == (120.0, 600, 4.0, 150.0)
    assert copied(600, 5.0, spans[:1], "promote").traced_rate is None


def step(start_s: float, rows: int = DECODERS, seconds: float = 1e-6) -> Span:
    return Span("step", "step", start_s * 1e6, seconds * 1e6, {"model": "m", "rows": rows, "tokens": rows})


def test_gaps_are_from_start_to_start_of_successive_steps_with_all_decoders() -> None:
    began = [step(0, 3), step(1), step(2), step(2.5, DECODERS - 1), step(4), step(9, 1)]
    told = noticed([[*began, Span("compute", "block 0", 1.5e6, 1.0)], [step(0), step(1)], []])
    assert (told.median, told.gaps, told.seconds) == (1.0, 3, 4.0)  # 1, 2, and 1 of another trace
    assert told.p99 == pytest.approx(1.98)


def test_the_device_time_of_full_steps_is_a_figure_of_its_own() -> None:
    told = noticed([[step(0, 3, 9.0), step(1, seconds=0.5), step(2, seconds=0.6), step(3, seconds=0.7)]])
    assert told.step_median == pytest.approx(0.6) and told.step_p99 == pytest.approx(0.698)


def test_a_steps_time_outside_of_blocks_is_a_figure_of_its_own() -> None:
    blocks = [Span("compute", "block 0", start * 1e6, 0.5e6) for start in (1.1, 1.6, 2.1, 2.6, 3.3, 3.8)]
    told = noticed([[step(1, seconds=1.1), step(2, seconds=1.1), step(3, seconds=1.3), *blocks]])
    assert told.idle_median == pytest.approx(0.1) and told.idle_p99 == pytest.approx(0.296)


def test_copies_that_begin_within_a_gap_count() -> None:
    copies = [
        Span("pages up", f"promote {at}", at * 1e6, 5e6, {"bytes": size})
        for at, size in ((0, 1), (1, 10), (2, 100), (3, 1000))
    ]
    down = Span("copy", "demote 4", 2e6, 1.0, {"bytes": 7})
    ring = Span("copy", "block 3", 2e6, 1.0, {"bytes": 9})
    told = noticed([[step(1), step(2), step(3), *copies, down, ring]])
    assert (told.bytes_up, told.bytes_down) == (110, 7)


def test_fewer_than_two_gaps_are_an_error() -> None:
    with pytest.raises(click.ClickException, match="--steps"):
        noticed([[step(0), step(1), step(2, DECODERS + 1)]])
