from __future__ import annotations

import math
from collections.abc import Mapping
from copy import deepcopy

import pytest

from djinn_client.protocol import CLASSES, Class
from djinnd.core.session import Session
from djinnd.scheduler.batch.step_budget import StepBudget, StepLimits, step_limits
from djinnd.scheduler.timing.step_times import StepTimes
from djinnd.scheduler.tuning import STEP

NO_LIMITS: Mapping[Class, float] = {}


def session(name: str, remaining: int = 1, priority: Class = "batch") -> Session:
    return Session(name, "m", 1000, priority, tokens=[7] * (remaining + 2), computed=2)


def known(rows: Mapping[int, float], further: Mapping[int, float] | None = None) -> StepTimes:
    """Step times by number of rows, and how much longer a step takes with further tokens; by default the same as with
    as many rows."""
    times = StepTimes()
    for _ in range(4):
        for count, takes in rows.items():
            times.note(count, 0, takes)
    for _ in range(4):
        for count, takes in (further or rows).items():
            times.note(1, count, rows[1] + takes)
    return times


def budget(
    order: list[Session],
    max_tokens: int = 4096,
    max_rows: int = 256,
    times: StepTimes | None = None,
    targets: Mapping[Class, float] = NO_LIMITS,
    recent: Mapping[Class, float] | None = None,
    lateness: Mapping[Class, float] = NO_LIMITS,
) -> StepBudget:
    """`targets`: seconds between tokens. `recent`: the same for classes with a recent call; by default all in order."""
    decoding = {name: sum(one.remaining == 1 for one in order if one.priority == name) for name in CLASSES}
    present = {one.priority for one in order}
    of_decoding = {name: targets.get(name, math.inf) for name in CLASSES if decoding[name]}
    of_recent = {name: targets.get(name, math.inf) for name in present} if recent is None else recent
    limits = step_limits(of_recent, of_decoding, lateness)
    return StepBudget(max_tokens, max_rows, times or StepTimes(), limits, decoding)


def shares(budget: StepBudget, sessions: list[Session]) -> list[int]:
    """The share of each session if all take theirs in turn. Checks that sessions that need one token get the same if
    they take it at once."""
    at_once = deepcopy(budget)
    counts = []
    for session in sessions:
        counts.append(budget.share(session.priority, session.remaining))
        if counts[-1]:
            budget.take(session.remaining, counts[-1])
        if session.remaining == 1 and not at_once.is_full:
            taken = min(at_once.ones(session.priority), 1)
            at_once.take_ones(session.priority, taken)
        elif taken := at_once.share(session.priority, session.remaining):
            at_once.take(session.remaining, taken)
        assert taken == counts[-1]
    return counts


def test_guesses_may_take_the_tokens_and_the_time_that_no_row_has_taken() -> None:
    order = [session("a"), session("b", remaining=6)]
    whole = budget(order, max_tokens=20)
    assert shares(whole, order) == [1, 6] and whole.spare == 13
    times = known({1: 0.01, 2: 0.01, 4: 0.01}, {8: 0.01, 16: 0.02, 32: 0.04})
    limited = budget(order[:1], times=times, targets={"batch": 0.03 / STEP.headroom})
    assert shares(limited, order[:1]) == [1] and limited.spare == 16
    late = budget(order[:1], times=times, targets={"batch": 0.001})
    assert shares(late, order[:1]) == [1] and late.spare == 2, "overrun, as for prompts"


@pytest.mark.parametrize(
    ("remaining", "max_tokens", "max_rows", "expected"),
    [
        ([1, 1, 1], 8, 8, [1, 1, 1]),
        ([1, 1, 1], 2, 8, [1, 1, 0]),
        ([1, 1, 1], 8, 2, [1, 1, 0]),
        ([20], 8, 8, [8]),
        ([5, 5, 5], 8, 8, [5, 3, 0]),
        ([5, 1, 5, 1], 8, 8, [5, 1, 1, 1]),  # decoding rows first, then chunks from the rest
        ([1, 5, 1, 5], 8, 3, [1, 5, 1, 0]),
        ([1, 20, 1, 1], 3, 8, [1, 0, 1, 1]),
        ([20, 1, 1, 1], 3, 8, [1, 1, 1, 0]),  # a token is kept for the first
        ([20, 1, 1, 1], 8, 3, [6, 1, 1, 0]),  # a row is kept for the first
        ([20, 1], 1, 8, [1, 0]),
        ([20, 1], 8, 1, [8, 0]),
        ([1, 20], 8, 1, [1, 0]),
    ],
)
def test_rows_and_tokens_are_shared_out(
    remaining: list[int], max_tokens: int, max_rows: int, expected: list[int]
) -> None:
    order = [session(str(i), count) for i, count in enumerate(remaining)]
    assert shares(budget(order, max_tokens, max_rows), order) == expected


def test_a_share_that_is_not_taken_is_left_for_the_next() -> None:
    order = [session("a", 6), session("b", 6), session("c", 1), session("d", 1)]
    left = budget(order, max_tokens=8, max_rows=3)
    assert left.share("batch", 6) == 6  # a gets no pages
    assert shares(left, order[1:]) == [6, 1, 1]


def test_tokens_that_a_chunk_did_not_need_are_left_for_the_next() -> None:
    left = budget([session("a", 6), session("b", 6)], max_tokens=8, max_rows=3)
    assert left.share("batch", 6) == 6
    left.take(6, 1)  # the rest of its prompt had been computed
    assert left.share("batch", 6) == 6


def test_decoding_sessions_of_a_lower_class_leave_a_prompt_its_row() -> None:
    order = [
        session("i", priority="interactive"),
        session("p", 6, priority="interactive"),
        *(session(f"b{n}") for n in "123"),
    ]
    assert shares(budget(order, max_tokens=8, max_rows=3), order) == [1, 6, 1, 0, 0]


# --- targets --------------------------------------------------------------------------------------------------------

SIZES = sorted({round(2 ** (bucket / 2)) for bucket in range(23)})
LINEAR = {count: 0.001 * count for count in SIZES}
FLAT = dict.fromkeys(SIZES, 0.1)  # as with a streamed model
NOTHING = dict.fromkeys(SIZES, 0.0)
HEADROOM = STEP.headroom


def rows_of(priority: Class, count: int) -> list[Session]:
    return [session(f"{priority}{number}", priority=priority) for number in range(count)]


def test_limits_follow_from_the_targets_of_higher_classes_and_for_chunks_from_the_own() -> None:
    limits = step_limits({"interactive": 0.04, "agent": 0.08}, {"agent": 0.08, "batch": 1.0}, {})
    assert limits == {
        "interactive": StepLimits(),
        "agent": StepLimits(HEADROOM * 0.04, HEADROOM * 0.04),
        "batch": StepLimits(HEADROOM * 0.04, HEADROOM * 0.04),
    }
    limits = step_limits({}, {"interactive": 0.04, "batch": 1.0}, {})
    assert [limits[name] for name in CLASSES] == [
        StepLimits(math.inf, HEADROOM * 0.04),
        StepLimits(),
        StepLimits(math.inf, HEADROOM),
    ]


@pytest.mark.parametrize(("late", "stretch"), [(0.5, 1.0), (1.5, 1.5), (100.0, STEP.latest)])
def test_late_first_tokens_make_the_tokens_of_their_own_class_late_too(late: float, stretch: float) -> None:
    recent: dict[Class, float] = {"interactive": 0.04}
    limits = step_limits(recent, {"interactive": 0.04, "agent": 0.08}, {"interactive": late, "agent": late})
    assert limits["interactive"].chunks == pytest.approx(HEADROOM * 0.04 * stretch)
    assert limits["agent"].chunks == HEADROOM * 0.04, "the highest class's target stays"


def test_lower_classes_join_as_far_as_the_target_of_a_higher_one_allows() -> None:
    order = rows_of("interactive", 20) + rows_of("batch", 50)
    assert sum(shares(budget(order, times=known(LINEAR), targets={"interactive": 0.0501 / HEADROOM}), order)) == 50


def test_a_prompt_fills_the_time_that_sessions_of_its_class_leave() -> None:
    order = [*rows_of("interactive", 100), *(session(f"p{n}", 2000, "interactive") for n in range(2))]
    counts = shares(budget(order, times=known(LINEAR), targets={"interactive": 0.3 / HEADROOM}), order)
    assert counts[:100] == [1] * 100
    assert counts[100] == pytest.approx(200, rel=0.05) and counts[101] == 0


def test_some_tokens_of_prompts_are_read_in_any_case_if_no_higher_class_has_a_row() -> None:
    least, targets = STEP.least_chunk, {"interactive": 0.001, "agent": 0.001}
    order = [*rows_of("interactive", 1), *(session(f"p{n}", 2000, "interactive") for n in range(2))]
    assert shares(budget(order, times=known(LINEAR), targets=targets), order) == [1, least, 0]  # type: ignore[arg-type]
    short = [*rows_of("interactive", 1), *(session(f"p{n}", least // 3, "interactive") for n in range(4))]
    counts = shares(budget(short, times=known(LINEAR), targets=targets), short)  # type: ignore[arg-type]
    assert counts == [1, *[least // 3] * 3, least % 3], "several short prompts take the place of a long one"
    order = [*rows_of("interactive", 1), *rows_of("agent", 1), session("p", 2000, "agent")]
    assert shares(budget(order, times=known(LINEAR), targets=targets), order) == [1, 0, 0]  # type: ignore[arg-type]


def test_rows_that_miss_their_target_by_themselves_may_be_overrun_a_little() -> None:
    order = [*rows_of("interactive", 100), session("p", 2000, "interactive"), *rows_of("batch", 100)]
    counts = shares(budget(order, times=known(LINEAR), targets={"interactive": 0.001}), order)
    assert counts[:100] == [1] * 100
    assert counts[100] == STEP.least_chunk, "more than the overrun of a quarter"
    order = rows_of("interactive", 100) + rows_of("batch", 100)
    assert sum(shares(budget(order, times=known(LINEAR), targets={"interactive": 0.001}), order)) == 125


def test_rows_that_cost_nothing_join_a_step_that_is_late_in_any_case() -> None:
    order = [*rows_of("interactive", 1), session("p", 2000), *rows_of("batch", 10)]
    times = known(FLAT, NOTHING)
    assert shares(budget(order, times=times, targets={"interactive": 0.001}), order) == [1, 2000, *[1] * 10]


def test_sessions_without_targets_limit_nothing() -> None:
    order = [*rows_of("interactive", 1), session("p", 2000, "interactive"), *rows_of("batch", 9), session("b", 999)]
    assert shares(budget(order, times=known(LINEAR)), order) == [1, 2000, *[1] * 9, 999]


@pytest.mark.parametrize("priority", CLASSES)
@pytest.mark.parametrize("recent", [{}, {"interactive": 0.5}, {"agent": 0.5}, {"batch": 0.5}])
def test_lower_classes_take_the_device_for_short_steps_while_a_higher_class_may_call(
    priority: Class, recent: dict[Class, float]
) -> None:
    order = [session("p", 2000, priority)]
    is_short = any(CLASSES.index(higher) < CLASSES.index(priority) for higher in recent)
    (count,) = shares(budget(order, times=known({1: 0.1}, LINEAR), recent=recent), order)
    assert count == (pytest.approx((HEADROOM * 0.5 - 0.1) / 0.001, rel=0.05) if is_short else 2000)


def test_lower_classes_stay_out_of_a_few_steps_until_the_time_of_the_decoding_rows_is_known() -> None:
    order = [*rows_of("interactive", 1), session("b", 2000)]
    times, steps = StepTimes(), 0
    while shares(budget(order, times=times, targets={"interactive": 10.0}), order) == [1, 0]:
        times.note(1, 0, 0.001)
        steps += 1
    assert 3 <= steps <= 5


def test_only_sessions_with_a_row_limit_a_chunk() -> None:
    """A thousand sessions decode, and eight of them have a row. Their time is that of a step with eight rows."""
    order = [session("p", 2000, "interactive"), *rows_of("interactive", 1000)]
    targets: dict[Class, float] = {"interactive": 0.5 / HEADROOM}
    counts = shares(budget(order, max_rows=8, times=known(LINEAR), targets=targets), order)
    assert counts[0] == pytest.approx(492, rel=0.05) and counts[1:8] == [1] * 7
