from __future__ import annotations

import pytest

from djinnd.scheduler import step_times
from djinnd.scheduler.step_times import StepTimes

SIZES = (1, 2, 4, 8, 16, 64, 256, 1024)


def known(*points: tuple[int, float]) -> StepTimes:
    times = StepTimes()
    for tokens, seconds in points:
        times.note(tokens, 100.0)  # the first of a size tells nothing
        times.note(tokens, seconds)
    return times


def test_nothing_is_known_before_a_size_has_run_twice() -> None:
    times = StepTimes()
    for tokens in SIZES:
        times.note(tokens, 9.0)
    assert times.predict(4) == 0.0 and times.within(1.0) is None


def test_a_size_takes_what_it_took() -> None:
    times = known((1, 0.1), (64, 0.5))
    assert (times.predict(1), times.predict(64)) == (0.1, 0.5)


def test_between_two_sizes_the_time_rises_evenly() -> None:
    times = known((4, 0.25), (16, 1.0))
    assert times.predict(10) == 0.625
    assert (times.within(0.625), times.within(0.624)) == (10, 9)


def test_a_size_below_all_that_are_known_takes_as_long_as_the_smallest() -> None:
    times = known((16, 0.4), (64, 0.8))
    assert times.predict(1) == times.predict(16) == 0.4
    assert times.within(0.3) == 0


def test_a_size_beyond_all_that_are_known_is_to_be_tried() -> None:
    times = known((16, 0.4), (64, 0.8))
    assert times.predict(5000) == 0.8
    assert times.within(0.8) is None and times.within(0.79) == 62


def test_a_larger_step_takes_no_less_than_a_smaller_one() -> None:
    times = known((16, 0.4), (64, 0.1), (256, 0.6))
    assert (times.predict(16), times.predict(64)) == (0.1, 0.1)
    assert times.within(0.09) == 0


def test_a_size_that_was_slow_once_says_nothing_of_larger_ones() -> None:
    times = known(*((tokens, 0.01 * tokens) for tokens in SIZES))
    times.note(4, 1000.0)
    assert times.predict(64) == pytest.approx(0.64)
    assert times.within(0.64) == 64


def test_what_changes_is_learned() -> None:
    times = known((16, 0.1))
    times.note(16, 0.2)
    assert times.predict(16) == pytest.approx(0.12)
    for _ in range(50):
        times.note(16, 0.2)
    assert times.predict(16) == pytest.approx(0.2, rel=1e-3)


def test_sizes_that_are_alike_are_one() -> None:
    times = StepTimes()
    times.note(100, 9.0)
    times.note(97, 0.3)
    assert times.predict(91) == 0.3


def test_what_has_not_run_for_long_is_forgotten_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "_FORGOTTEN", 8)
    times = known((1, 0.1), (1024, 5.0))
    assert times.within(1.0) is not None
    for _ in range(16):
        times.note(1, 0.1)
    assert times.within(1.0) is None and times.predict(1) == pytest.approx(0.1)
    times.note(1024, 50.0)
    assert times.within(1.0) is None
