from __future__ import annotations

import pytest

from tools.bench.loads.course import WINDOW_S, Course, fairness, jain, outcome, pooled


def test_jains_index_of_equal_and_of_unequal_values() -> None:
    assert jain([2.0, 2.0, 2.0]) == pytest.approx(1.0)
    assert jain([1.0, 0.0, 0.0, 0.0]) == pytest.approx(0.25)
    assert jain([0.0, 0.0]) == 1.0


def test_fairness_is_by_weight_and_by_window() -> None:
    served = {(1, 0): 10.0, (2, 0): 20.0, (1, 1): 10.0, (2, 1): 0.0}
    found = fairness(served, (1, 2), {2: 2.0}, range(2))
    assert found.count == 2
    assert found.worst == pytest.approx(0.5)
    assert found.mean == pytest.approx(0.75)


def of_one_call(tenant: int, began: float = 0.0) -> Course:
    course = Course(began)
    course.first("g", tenant, 10, began + 1.0, began + 1.5, wakes=True, started=began + 1.2)
    before = None
    for second in (1.5, 1.6, 1.8):
        course.token("g", tenant, before, began + second)
        before = began + second
    course.ended = began + 3 * WINDOW_S
    return course


def test_a_call_counts_in_its_groups_times_and_in_its_tenants_tokens() -> None:
    found = outcome(of_one_call(7, began=100.0), {}, first_window=0)
    group = found.groups["g"]
    assert (group.calls, found.tokens, found.tenant_tokens) == (1, 3, {7: 3})
    assert group.first_token.p50 == group.wake_up.p50 == pytest.approx(0.5)
    assert group.queued.p50 == pytest.approx(0.2)
    assert group.between_tokens.count == 2 and group.between_tokens.worst == pytest.approx(0.2)
    assert found.tokens_per_s == pytest.approx(3 / (3 * WINDOW_S))
    assert found.jain is None


def test_shares_count_prompt_tokens_or_device_time_where_it_is_known() -> None:
    course = of_one_call(1)
    course.token("g", 2, None, 2.0)
    assert outcome(course, {}, first_window=0).shares == pytest.approx({1: 13 / 14, 2: 1 / 14})
    course.device_s[1, 0] = course.device_s[2, 0] = 0.5
    assert outcome(course, {}, first_window=0).shares == {1: 0.5, 2: 0.5}


def test_pooled_courses_follow_each_other_in_time() -> None:
    whole = pooled([of_one_call(1), of_one_call(1, began=50.0)])
    assert whole.ended == 6 * WINDOW_S
    assert whole.tokens == {(1, 0): 3, (1, 3): 3}
    assert whole.groups["g"].calls == 2
