"""Predicted step times, after any measurements in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from djinnd.scheduler.timing.step_times import Curve, StepTimes

SECONDS = st.floats(1e-4, 10.0)


@given(
    notes=st.lists(st.tuples(st.integers(1, 5000), SECONDS), min_size=1, max_size=60),
    count=st.integers(1, 10_000),
    seconds=SECONDS,
)
def test_the_curve_never_falls_and_at_agrees_with_within(
    notes: list[tuple[int, float]], count: int, seconds: float
) -> None:
    curve = Curve()
    for note in notes:
        curve.note(*note)
    assert curve.at(count) <= curve.at(count + 1)
    most = curve.within(seconds)
    smallest = curve.at(1)
    if curve.largest and smallest <= seconds:
        assert most >= curve.largest or curve.at(most + 1) >= seconds * (1 - 1e-9)
        assert curve.at(most) <= seconds * (1 + 1e-9)
        assert most <= 2 * curve.largest or curve.largest < 8


@given(
    notes=st.lists(st.tuples(st.integers(1, 300), st.integers(0, 2000), SECONDS), max_size=60),
    rows=st.integers(1, 400),
    further=st.integers(0, 3000),
    seconds=SECONDS,
)
def test_more_rows_and_more_tokens_never_take_less(
    notes: list[tuple[int, int, float]], rows: int, further: int, seconds: float
) -> None:
    times = StepTimes()
    for note in notes:
        times.note(*note)
    assert times.predict(rows, further) <= times.predict(rows + 1, further)
    assert times.predict(rows, further) <= times.predict(rows, further + 1)
    assert times.rows_within(seconds, further) <= times.rows_within(2 * seconds, further)
    assert times.further_within(seconds, rows) <= times.further_within(2 * seconds, rows)
