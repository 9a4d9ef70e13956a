from __future__ import annotations

from itertools import islice
from pathlib import Path

import click
import pytest

from tools.bench.loads.load import Group, Load, read, visits
from tools.bench.loads.named import LOADS

CHAT = Group(
    priority="interactive",
    sessions=3,
    tenants=(1, 2),
    context=(10, 20),
    prompt=(1, 2),
    answer=(3, 4),
    calls=4,
    pause_s=(0.5, 1.0),
)


def test_drawing_a_load_twice_gives_the_same_visits() -> None:
    load = Load(seconds=1, groups={"chat": CHAT})
    first, second = ([list(islice(slot, 2)) for slot in visits(load)] for _ in range(2))
    assert [[v.calls for v in slot] for slot in first] == [[v.calls for v in slot] for slot in second]
    assert first[0][0].calls != first[1][0].calls


def test_sessions_follow_one_another_and_belong_to_the_group_s_tenants_in_turns() -> None:
    slots = [list(islice(slot, 3)) for slot in visits(Load(seconds=1, groups={"chat": CHAT}))]
    assert [slot[0].tenant for slot in slots] == [1, 2, 1]
    assert all(visit.tenant == slot[0].tenant for slot in slots for visit in slot)
    numbers = [visit.number for slot in slots for visit in slot]
    assert len(set(numbers)) == len(numbers)


def test_the_first_call_brings_the_context_and_later_calls_follow_after_pauses() -> None:
    visit = next(next(visits(Load(seconds=1, groups={"chat": CHAT}))))
    first, *others = visit.calls
    assert first.pause_s == 0 and 10 <= first.tokens <= 20 and 3 <= first.answer <= 4
    assert len(others) == 3
    assert all(0.5 <= call.pause_s <= 1.0 and 1 <= call.tokens <= 2 for call in others)


def test_sessions_of_a_group_with_a_rate_arrive_once_each_in_order_of_time() -> None:
    group = Group(priority="agent", sessions=50, rate=2.0, context=(1, 1), answer=(1, 1))
    slots = [list(slot) for slot in visits(Load(seconds=1, groups={"agents": group}))]
    times = [visit.arrives_s for slot in slots for visit in slot]
    assert len(times) == 50 and times == sorted(times)
    assert 12 < times[-1] < 50  # 25 seconds are to be expected


def test_a_load_is_read_from_yaml(tmp_path: Path) -> None:
    file = tmp_path / "load.yaml"
    file.write_text(
        "seconds: 5\nweights: {1: 2}\n"
        "groups: {a: {class: batch, sessions: 2, tenants: [1], context: [1, 2], answer: [3, 3]}}\n"
    )
    load = read(file)
    assert load.weights == {1: 2.0} and load.tenants == [1]
    assert load.groups["a"] == Group(priority="batch", sessions=2, tenants=(1,), context=(1, 2), answer=(3, 3))
    file.write_text("seconds: 5\ngroups: {a: {class: batch, sesions: 2}}\n")
    with pytest.raises(click.BadParameter, match="sesions"):
        read(file)


def test_the_day_has_ten_thousand_sessions() -> None:
    assert sum(group.sessions for group in LOADS["day"].groups.values()) == 10_000
