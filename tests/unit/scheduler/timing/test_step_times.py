from __future__ import annotations

import math

import pytest

from djinnd.scheduler.timing import step_times
from djinnd.scheduler.timing.step_times import NO_LIMIT, Curve, StepTimes
from djinnd.scheduler.tuning import TimesTuning

SIZES = (1, 2, 4, 8, 16, 64, 256, 1024)


def known(*points: tuple[int, float]) -> Curve:
    curve = Curve()
    for count, seconds in points:
        curve.note(count, 100.0)  # the first measurement of a size is dropped
        curve.note(count, seconds)
    return curve


def measured(times: StepTimes, rows: int, further: int, seconds: float, often: int = 5) -> None:
    for _ in range(often):
        times.note(rows, further, seconds)


# --- a curve --------------------------------------------------------------------------------------------------------


def test_a_size_is_unknown_before_it_has_run_twice() -> None:
    curve = Curve()
    for count in SIZES:
        curve.note(count, 9.0)
    assert curve.at(4) == 0.0 and curve.largest == 0


def test_a_size_is_predicted_as_measured() -> None:
    curve = known((1, 0.1), (64, 0.5))
    assert (curve.at(1), curve.at(64)) == (0.1, 0.5)


def test_between_two_sizes_the_time_rises_evenly() -> None:
    curve = known((4, 0.25), (16, 1.0))
    assert curve.at(10) == 0.625
    assert (curve.within(0.625), curve.within(0.624)) == (10, 9)


def test_sizes_below_the_smallest_known_are_tried_in_proportion() -> None:
    curve = known((16, 0.4), (64, 0.8))
    assert curve.at(1) == curve.at(16) == 0.4
    assert curve.within(0.2) == 8 and curve.within(0.0) == curve.within(-1.0) == 0


def test_twice_the_largest_known_size_is_tried() -> None:
    curve = known((16, 0.4), (64, 0.8))
    assert curve.at(5000) == 0.8
    assert curve.within(0.8) == 128 and curve.within(0.79) == 62
    assert curve.within(math.inf) == NO_LIMIT


def test_a_few_are_tried_if_no_size_is_known() -> None:
    assert 0 < Curve().within(1.0) <= 32
    assert Curve().within(math.inf) == NO_LIMIT


def test_a_larger_size_takes_no_less_than_a_smaller_one() -> None:
    curve = known((16, 0.4), (64, 0.1), (256, 0.6))
    assert (curve.at(16), curve.at(64)) == (0.1, 0.1)


def test_an_outlier_does_not_count() -> None:
    curve = known(*((count, 0.01 * count) for count in SIZES))
    for _ in range(3):
        curve.note(1024, 10.24)
    curve.note(1024, 1000.0)
    assert curve.at(1024) == pytest.approx(10.24)


def test_a_size_that_was_slow_once_does_not_raise_larger_ones() -> None:
    curve = known(*((count, 0.01 * count) for count in SIZES if count != 4), (4, 1000.0))
    assert curve.at(4) == pytest.approx(0.08) and curve.at(64) == pytest.approx(0.64)


def test_a_change_is_learned() -> None:
    curve = known((16, 0.1))
    for _ in range(5):
        curve.note(16, 0.2)
    assert curve.at(16) == 0.2


def test_similar_sizes_share_a_bucket() -> None:
    curve = Curve()
    curve.note(100, 9.0)
    curve.note(97, 0.3)
    assert curve.at(91) == 0.3


def test_a_size_that_has_not_run_for_long_is_forgotten_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_times, "TIMES", TimesTuning(forgotten=8))
    curve = known((1, 0.1), (1024, 5.0))
    for _ in range(16):
        curve.note(1, 0.1)
    assert curve.largest == 1
    curve.note(1024, 0.2)
    assert curve.at(1024) == 0.2, "it need not be compiled again"


# --- rows, and tokens beyond one each ---------------------------------------------------------------------------------


def test_the_time_of_prompts_is_what_exceeds_that_of_their_rows() -> None:
    times = StepTimes()
    measured(times, 4, 0, 1.0)
    measured(times, 8, 0, 2.0)
    measured(times, 4, 64, 1.5)
    assert times.predict(4) == 1.0 and times.predict(8, 64) == 2.5
    assert times.further_within(2.5, 8) == 128 and times.further_within(2.25, 8) == 32
    assert times.rows_within(1.5, 64) == 4 and times.rows_within(2.0) == 16


def test_a_device_with_slower_kernels_for_prompts_shows_in_further() -> None:
    """For example, single tokens are a captured graph, and chunks are launched kernel by kernel."""
    times = StepTimes()
    for rows in (1, 2, 4, 8, 16, 32):
        measured(times, rows, 0, 0.010)
    measured(times, 16, 1, 0.030)
    assert times.rows_within(0.0125) == 64, "rows cost nothing"
    assert times.further_within(0.0125, 16) == 0, "but one token of a prompt does"


def test_prompts_that_were_measured_beside_a_guess_are_measured_again() -> None:
    times = StepTimes()
    measured(times, 2, 0, 1.0)
    measured(times, 32, 16, 5.0)  # the time of 32 rows is unknown
    assert times.predict(32, 16) == 5.0
    measured(times, 32, 0, 4.5)
    measured(times, 32, 16, 5.0)
    assert times.predict(2, 16) == 1.5


def test_rows_that_never_ran_alone_are_wanted_until_they_have() -> None:
    times = StepTimes()
    asked = 0
    while times.wants(4):
        asked += 1
        times.ask(4)
        times.note(4, 0, 1.0)
    assert 3 <= asked <= 5 and times.predict(4) == 1.0
    assert times.wants(16)


def test_rows_are_wanted_for_a_limited_number_of_steps() -> None:
    times, asked = StepTimes(), 0
    while times.wants(4) and asked < 1000:
        asked += 1
        times.ask(4)
    assert asked < 100 and times.wants(16)


def test_asking_what_is_wanted_does_not_count() -> None:
    times = StepTimes()
    assert all(times.wants(4) for _ in range(1000))


def test_the_cost_of_guesses_is_unknown_until_enough_steps_with_few_further_tokens_were_measured() -> None:
    times = StepTimes()
    measured(times, 1, 0, 1.0)
    measured(times, 1, 64, 5.0)
    assert times.of_guess(8) == 0.0
    for tokens, seconds in ((2, 9.0), (2, 9.0), (5, 1.25), (5, 1.25)):  # the first of each size is dropped
        times.note(1, tokens, seconds)
    assert times.of_guess(8) == 0.0
    times.note(1, 5, 1.25)
    assert times.of_guess(5) == 0.25
