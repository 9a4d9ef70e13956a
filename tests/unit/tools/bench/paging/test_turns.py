"""The results of a long session's turns."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from tools.bench.paging.turns import again, summary, table


def found(*computed_again: int) -> dict[str, Any]:
    copy = {"nbytes": 2_000_000_000, "seconds": 0.08, "rate": 25e9, "traced_rate": 50e9}
    return {
        "device": "a card",
        "tokens": 100_000,
        "page_tokens": 256,
        "session_bytes": 2_000_000_000,
        "bus": {"up": 55e9, "down": 50e9},
        "demote": copy,
        "promote": copy,
        "turns": [{"seconds": 0.1, "again": count} for count in computed_again],
    }


def test_the_turn_that_computed_most_counts() -> None:
    assert again(found(0, 255, 3)) == 255


def test_rates_are_shares_of_the_bus_in_their_direction() -> None:
    assert summary(found(7)) == (
        "100,000 tokens, 2.00 GB: copies leave at 1.00 of the bus and come back at 0.91; a turn computes at most 7 "
        "tokens again"
    )
    console = Console(width=120)
    with console.capture() as shown:
        console.print(table("m", found(7)))
    assert "0.91" in shown.get() and "a page has 256" in shown.get()


def test_without_a_trace_the_whole_pause_counts() -> None:
    untraced = found(7)
    untraced["demote"] = untraced["demote"] | {"traced_rate": None}
    assert "copies leave at 0.50 of the bus" in summary(untraced)
