from __future__ import annotations

import pytest

from tools.bench.harness.links import Link, parse_link, shaping


def test_a_link_is_read_with_and_without_a_loss() -> None:
    assert parse_link("10gbit,0.2ms") == Link(10, 0.2)
    assert parse_link("1gbit,20ms,1%") == Link(1, 20, 1)


@pytest.mark.parametrize("text", ["", "1gbit", "20ms,1gbit", "1gbit,20ms,1", "1gbit,20ms,1%,2"])
def test_other_words_are_no_link(text: str) -> None:
    with pytest.raises(ValueError, match="is no link; write RATEgbit"):
        parse_link(text)


def test_netem_makes_rate_delay_and_loss_and_there_is_no_relay() -> None:
    shaped = shaping(Link(1, 20, 1), netem=True)
    assert shaped is not None and shaped.relay_s == 0
    assert " ".join(shaped.qdisc).startswith("netem delay 10ms loss 1% rate 1gbit limit ")
    lossless = shaping(Link(10, 0.2), netem=True)
    assert lossless is not None and "loss" not in lossless.qdisc and "0.1ms" in lossless.qdisc


def test_without_netem_tbf_makes_the_rate_and_a_relay_the_delay() -> None:
    shaped = shaping(Link(1, 20), netem=False)
    assert shaped is not None and shaped.qdisc[:3] == ["tbf", "rate", "1gbit"]
    assert shaped.relay_s == pytest.approx(0.01)
    assert "a relay keeps each byte" in shaped.means


def test_a_delay_that_a_relay_cannot_keep_is_the_cables_own() -> None:
    shaped = shaping(Link(10, 0.2), netem=False)
    assert shaped is not None and shaped.relay_s == 0 and "the cable's own" in shaped.means


def test_without_netem_a_link_that_loses_packets_cannot_be_made() -> None:
    assert shaping(Link(1, 20, 1), netem=False) is None
