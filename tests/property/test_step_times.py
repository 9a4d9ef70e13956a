"""What is known of how long steps take, whatever was measured in whatever order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from djinnd.scheduler.step_times import StepTimes


@given(
    notes=st.lists(st.tuples(st.integers(1, 5000), st.floats(1e-4, 10.0)), min_size=1, max_size=60),
    tokens=st.integers(1, 10_000),
    seconds=st.floats(1e-4, 10.0),
)
def test_the_curve_never_falls_and_both_ways_of_asking_agree(
    notes: list[tuple[int, float]], tokens: int, seconds: float
) -> None:
    times = StepTimes()
    for note in notes:
        times.note(*note)
    assert times.predict(tokens) <= times.predict(tokens + 1)
    most = times.within(seconds)
    if most is None:
        assert times.predict(10_000) <= seconds
    else:
        assert most == 0 or times.predict(most) <= seconds * (1 + 1e-9)
        assert times.predict(most + 1) >= seconds * (1 - 1e-9)
