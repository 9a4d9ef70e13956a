from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from copy import deepcopy

import pytest

from djinn_client.protocol import CLASSES, Class
from djinnd.core.batch import Row
from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.scheduler.policy import (
    BUSY_STEPS,
    INDULGENCE,
    LEAST_CHUNK,
    NO_WAITS,
    PATIENCE_S,
    UNKNOWN,
    KvRead,
    Policy,
    Room,
    eviction_order,
    is_spared,
)
from djinnd.scheduler.timing.kv_time import SLOPES
from djinnd.scheduler.timing.step_times import StepTimes


def session(name: str, remaining: int = 1, touched: int = 0, priority: Class = "batch") -> Session:
    return Session(name, "m", 1000, priority, tokens=[7] * (remaining + 2), computed=2, touched=touched)


def names(sessions: list[Session]) -> list[str]:
    return [session.id for session in sessions]


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


def room(
    order: list[Session],
    max_tokens: int = 4096,
    max_rows: int = 256,
    times: StepTimes | None = None,
    policy: Policy = Policy(),  # noqa: B008
    lately: Collection[Class] = (),
    waited: Mapping[Class, float] = NO_WAITS,
    kv: Mapping[Class, KvRead] = UNKNOWN,
) -> Room:
    decoding = Counter(session.priority for session in order if session.remaining == 1)
    protected = Counter(s.priority for s in order if s.remaining == 1 and s.priority != "batch" and not s.bulk)
    by_class = {priority: decoding[priority] for priority in CLASSES}
    return Room(max_tokens, max_rows, times or StepTimes(), policy, by_class, protected, lately, waited, kv)


def test_protected_rows_decode_and_are_not_in_bulk_mode() -> None:
    def row(priority: Class, count: int = 1, *, bulk: bool = False) -> Row:
        one = session("a", priority=priority)
        one.bulk = bulk
        return Row(one, Request(1, 0, 1, 8), 2, count, 0, 6, True)

    assert is_spared(row("interactive")) and is_spared(row("agent"))
    assert not any(map(is_spared, (row("batch"), row("agent", 2), row("interactive", bulk=True))))


def shares(room: Room, sessions: list[Session]) -> list[int]:
    """The share of each session if all take theirs in turn. Checks that sessions that need one token get the same if
    they take it at once."""
    at_once = deepcopy(room)
    counts = []
    for session in sessions:
        counts.append(room.share(session.priority, session.remaining))
        if counts[-1]:
            room.take(session.remaining, counts[-1], shields=not session.bulk)
        if session.remaining == 1 and not at_once.is_full:
            taken = min(at_once.ones(session.priority), 1)
            at_once.take_ones(session.priority, taken, taken * (not session.bulk))
        elif taken := at_once.share(session.priority, session.remaining):
            at_once.take(session.remaining, taken, shields=not session.bulk)
        assert taken == counts[-1]
    return counts


def test_idle_sessions_are_evicted_first_then_held_ones_then_the_last_to_arrive() -> None:
    idle = [session("idle-late", touched=9), session("idle-early", touched=3)]
    held = [session("held-late", touched=8), session("held-early", touched=2)]
    order = [session("first"), session("second")]
    evicted = list(eviction_order(idle, held, order))
    assert names(evicted) == ["idle-early", "idle-late", "held-early", "held-late", "second", "first"]


def test_waiting_sessions_are_evicted_first_in_reverse_order_of_their_expected_return() -> None:
    soon, late, talks, urgent = (session(name) for name in ("soon", "late", "talks", "urgent"))
    for one, until in ((soon, 5.0), (late, 50.0), (urgent, 500.0)):
        one.waits, one.wakes_at = True, until
    urgent.priority = "interactive"
    early, recent = session("early", touched=3), session("recent", touched=9)  # without an expected time
    early.waits = recent.waits = True
    evicted = list(eviction_order([talks, urgent, recent, soon, early, late], (), []))
    assert names(evicted) == ["late", "soon", "early", "recent", "urgent", "talks"]


def test_called_sessions_are_the_last_idle_ones_to_be_evicted() -> None:
    called, silent, waits = session("called", touched=1), session("silent", touched=9), session("waits", touched=5)
    called.called, called.priority, waits.waits = True, "batch", True
    assert names(list(eviction_order([called, silent, waits], (), []))) == ["waits", "silent", "called"]


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
def test_room_is_shared_out(remaining: list[int], max_tokens: int, max_rows: int, expected: list[int]) -> None:
    order = [session(str(i), count) for i, count in enumerate(remaining)]
    assert shares(room(order, max_tokens, max_rows), order) == expected


def test_a_share_that_is_not_taken_is_left_for_the_next() -> None:
    order = [session("a", 6), session("b", 6), session("c", 1), session("d", 1)]
    left = room(order, max_tokens=8, max_rows=3)
    assert left.share("batch", 6) == 6  # a gets no pages
    assert shares(left, order[1:]) == [6, 1, 1]


def test_tokens_that_a_chunk_did_not_need_are_left_for_the_next() -> None:
    left = room([session("a", 6), session("b", 6)], max_tokens=8, max_rows=3)
    assert left.share("batch", 6) == 6
    left.take(6, 1, shields=False)  # the rest of its prompt had been computed
    assert left.share("batch", 6) == 6


def test_decoding_sessions_of_a_lower_class_leave_a_prompt_its_row() -> None:
    order = [
        session("i", priority="interactive"),
        session("p", 6, priority="interactive"),
        *(session(f"b{n}") for n in "123"),
    ]
    assert shares(room(order, max_tokens=8, max_rows=3), order) == [1, 6, 1, 0, 0]


# --- the time between tokens ----------------------------------------------------------------------------------------

SIZES = sorted({round(2 ** (bucket / 2)) for bucket in range(23)})
LINEAR = {count: 0.001 * count for count in SIZES}
FLAT = dict.fromkeys(SIZES, 0.1)  # as with a streamed model
NOTHING = dict.fromkeys(SIZES, 0.0)


@pytest.mark.parametrize(("slowdown", "rows"), [(25.001, 25), (1.501, 21), (1.04, 20), (1.0, 20)])
def test_lower_classes_join_as_far_as_the_slowdown_lets_them(slowdown: float, rows: int) -> None:
    """The limit is `slowdown` times the step of one row, or 5 % above the time of the decoding rows if they take
    longer."""
    order = [session(f"i{n}", priority="interactive") for n in range(20)] + [session(f"b{n}") for n in range(10)]
    assert sum(shares(room(order, times=known(LINEAR), policy=Policy(slowdown)), order)) == rows


KV_S = 1e-7  # seconds to read a token of KV
USUAL = 1000  # tokens of KV of a session; reading them takes a tenth of the time of a row


def knowing_kv() -> StepTimes:
    times = known(LINEAR)
    for number in range(2 * SLOPES):
        kv = number % 2 * USUAL
        times.note(1, 0, LINEAR[1] + kv * KV_S, kv)
    return times


@pytest.mark.parametrize(
    ("tokens", "lower"), [(USUAL, 5), (2 * USUAL, 4), (10 * USUAL, 3), (20 * USUAL, 1), (40 * USUAL, 0)]
)
def test_fewer_rows_of_lower_classes_join_if_kv_is_longer_than_usual(tokens: int, lower: int) -> None:
    """Seven rows of the batch class with the usual KV fit beside two that decode: they may take 7 ms and 0.7 ms of KV.
    A batch row reads the usual KV; the two decoding rows read more, as given."""
    order = [session(f"i{n}", priority="interactive") for n in range(2)] + [session(f"b{n}") for n in range(10)]
    kv = {"interactive": KvRead(tokens, USUAL), "batch": KvRead(USUAL, USUAL)}
    given = shares(room(order, times=knowing_kv(), policy=Policy(slowdown=7.001), kv=kv), order)
    assert given == [1, 1] + [1] * lower + [0] * (10 - lower)


@pytest.mark.parametrize(("tokens", "chunk"), [(2 * USUAL, 198), (200 * USUAL, 178)])
def test_chunks_are_smaller_if_kv_is_longer_than_usual(tokens: int, chunk: int) -> None:
    order = [session(f"i{n}", priority="interactive") for n in range(2)] + [session("p", 2000, priority="interactive")]
    kv = {"interactive": KvRead(tokens / 2, USUAL)}
    given = shares(room(order, times=knowing_kv(), policy=Policy(slowdown=182.0), kv=kv), order)
    assert given[:2] == [1, 1] and abs(given[2] - chunk) <= 4


def test_no_row_is_held_back_for_long_kv_if_that_is_usual() -> None:
    """The protected time is that of the steps that the class usually has."""
    order = [session(f"i{n}", priority="interactive") for n in range(2)] + [session(f"b{n}") for n in range(10)]
    long = KvRead(100 * USUAL, 100 * USUAL)  # a step of one row takes 11 ms
    kv = {"interactive": long, "batch": KvRead(0.0, 0.0)}
    given = shares(room(order, times=knowing_kv(), policy=Policy(slowdown=3.0), kv=kv), order)
    assert given == [1] * 12  # 12 + 2 * 10 of 33


def test_short_sessions_are_not_protected_by_the_kv_of_earlier_long_ones() -> None:
    order = [session(f"i{n}", priority="interactive") for n in range(2)] + [session(f"b{n}") for n in range(10)]
    given = []
    for usual in (USUAL, 100 * USUAL):
        kv = {"interactive": KvRead(USUAL, usual), "batch": KvRead(USUAL, USUAL)}
        given.append(shares(room(order, times=knowing_kv(), policy=Policy(slowdown=7.001), kv=kv), order))
    assert given[0] == given[1] == [1, 1] + [1] * 5 + [0] * 5


def faster() -> StepTimes:
    """Step times of a device that has become so much faster that steps of one row take less than their KV was found
    to."""
    times = StepTimes()
    for number in range(2 * SLOPES):
        kv = number % 2 * 10 * USUAL
        times.note(1, 0, LINEAR[1] + kv * KV_S, kv)
    for _ in range(5):
        times.note(1, 0, LINEAR[1] / 2, 10 * USUAL)
    assert times.predict(1) == 0.0
    return times


def test_rows_that_take_no_time_beside_their_kv_still_count_as_known() -> None:
    order = [session("i", priority="interactive"), *(session(f"b{n}") for n in range(40))]
    kv = {"interactive": KvRead(10 * USUAL, 10 * USUAL), "batch": KvRead(10 * USUAL, 10 * USUAL)}
    given = shares(room(order, times=faster(), policy=Policy(slowdown=3.001), kv=kv), order)
    assert given == [1] * 3 + [0] * 38
    times = faster()
    for further in 5 * [LEAST_CHUNK, 16 * LEAST_CHUNK]:
        times.note(1, further, further * 1e-4)
    reader = [session("b", 2000)]
    assert shares(room(reader, times=times, lately=["interactive"], kv=kv), reader) == [LEAST_CHUNK + 1]


def test_no_row_is_held_back_if_rows_cost_nothing_or_are_unknown() -> None:
    order = [session("i", priority="interactive"), session("b", 2000), *(session(f"b{n}") for n in range(10))]
    for times in (known(FLAT, NOTHING),):
        assert shares(room(order, times=times, policy=Policy(slowdown=1.0)), order) == [1, 2000] + [1] * 10


def test_further_classes_slow_the_highest_down_no_more_than_one() -> None:
    order = [session(f"i{n}", priority="interactive") for n in range(100)]
    order += [session(f"a{n}", priority="agent") for n in range(100)] + [session(f"b{n}") for n in range(100)]
    assert sum(shares(room(order, times=known(LINEAR), policy=Policy(slowdown=150.001)), order)) == 150


def test_a_prompt_is_read_in_chunks_beside_decoding_sessions() -> None:
    decoding = [session(f"i{n}", priority="interactive") for n in range(200)]
    order = [*decoding, session("prompt", 2000, priority="interactive"), session("next", 2000, priority="interactive")]
    counts = shares(room(order, times=known(LINEAR), policy=Policy(slowdown=400.0)), order)
    assert counts[:200] == [1] * 200
    assert 190 <= counts[200] <= 210 and counts[201] == 0


def test_some_tokens_of_one_prompt_are_read_in_any_case() -> None:
    order = [session("i", priority="interactive"), *(session(f"p{n}", 2000, priority="interactive") for n in range(2))]
    assert shares(room(order, times=known(LINEAR), policy=Policy(slowdown=1.0)), order) == [1, LEAST_CHUNK, 0]


def test_some_tokens_of_a_prompt_are_read_while_decoding_rows_are_measured() -> None:
    order = [session("i", priority="interactive"), *(session(f"p{n}", 2000, priority="interactive") for n in range(2))]
    assert shares(room(order), order) == [1, LEAST_CHUNK, 0]


def test_several_short_prompts_are_read_together_in_place_of_a_long_one() -> None:
    """With one prompt in each step, the last of many that come together would wait for all others."""
    short = [session(f"p{n}", LEAST_CHUNK // 3, priority="interactive") for n in range(4)]
    order = [session("i", priority="interactive"), *short]
    counts = shares(room(order, times=known(LINEAR), policy=Policy(slowdown=1.0)), order)
    assert counts == [1, *[LEAST_CHUNK // 3] * 3, LEAST_CHUNK % 3]


def test_no_prompt_of_a_lower_class_is_read_if_it_would_hold_up_a_higher_one() -> None:
    order = [session("i", priority="interactive"), session("a", priority="agent"), session("p", 2000, priority="agent")]
    assert shares(room(order, times=known(LINEAR), policy=Policy(slowdown=1.0)), order) == [1, 0, 0]


def test_a_prompt_beside_decoding_sessions_of_its_class_does_not_hold_up_a_higher_one() -> None:
    order = [session(f"i{n}", priority="interactive") for n in range(100)]
    order += [session(f"a{n}", priority="agent") for n in range(10)] + [session("p", 2000, priority="agent")]
    assert sum(shares(room(order, times=known(LINEAR), policy=Policy(slowdown=150.001)), order)) == 150


@pytest.mark.parametrize(
    ("priority", "patience", "times"),
    [("agent", 2.0, 2.0), ("agent", 1000.0, INDULGENCE), ("interactive", 1000.0, 1.0)],
)
def test_steps_of_agents_take_longer_for_agents_that_have_waited_long(
    priority: Class, patience: float, times: float
) -> None:
    """Interactive sessions are exempt: they do not wait longer for this."""
    order = [*(session(f"d{n}", priority=priority) for n in range(100)), session("p", 2000, priority=priority)]
    waited: dict[Class, float] = {priority: patience * PATIENCE_S}
    counts = shares(room(order, times=known(LINEAR), policy=Policy(slowdown=200.0), waited=waited), order)
    assert counts[100] == pytest.approx(200 * times - 100, rel=0.1)
    waited[priority] = 0.5 * PATIENCE_S
    assert shares(room(order, times=known(LINEAR), policy=Policy(slowdown=200.0), waited=waited), order)[100] <= 110


def test_agents_that_have_waited_long_do_not_slow_down_a_higher_class() -> None:
    order = [session(f"i{n}", priority="interactive") for n in range(100)]
    order += [session(f"a{n}", priority="agent") for n in range(10)] + [session("p", 2000, priority="agent")]
    policy = Policy(slowdown=150.001)
    assert sum(shares(room(order, times=known(LINEAR), policy=policy, waited={"agent": 60.0}), order)) == 150


def test_a_step_may_take_between_tokens_in_any_case() -> None:
    order = [session("i", priority="interactive"), session("p", 2000, priority="interactive")]
    policy = Policy(slowdown=1.0, between_tokens=0.5)
    assert shares(room(order, times=known(LINEAR), policy=policy), order)[1] == pytest.approx(500, rel=0.05)


def test_a_prompt_is_not_held_up_by_lower_classes() -> None:
    order = [session("p", 100, priority="interactive"), session("b", 2000)]
    counts = shares(room(order, times=known(LINEAR), policy=Policy(slowdown=1.5)), order)
    assert counts[0] == 100 and counts[1] == pytest.approx(50, abs=5)


@pytest.mark.parametrize("priority", CLASSES)
@pytest.mark.parametrize("lately", [set(), {"interactive"}, {"agent"}, {"batch"}, set(CLASSES)])
def test_lower_classes_take_the_device_briefly_while_a_higher_class_may_call(
    priority: Class, lately: set[Class]
) -> None:
    order, times = [session("p", 2000, priority=priority)], known({1: 0.1}, LINEAR)
    is_short = any(CLASSES.index(higher) < CLASSES.index(priority) for higher in lately)
    for policy, limit in ((Policy(), 0.1 * BUSY_STEPS), (Policy(between_tokens=0.5), 0.5)):
        (count,) = shares(room(order, times=times, policy=policy, lately=lately), order)
        assert count == (pytest.approx((limit - 0.1) / 0.001, rel=0.05) if is_short else 2000)


def test_lower_classes_are_not_limited_while_step_times_are_unknown() -> None:
    order = [session("p", 2000)]
    assert shares(room(order, lately={"interactive"}), order) == [2000]


def test_sessions_in_bulk_mode_are_not_protected() -> None:
    bulk = session("i", priority="interactive")
    bulk.bulk = True
    order = [bulk, session("p", 2000, priority="interactive"), session("b", 2000)]
    assert shares(room(order, times=known(LINEAR), policy=Policy(slowdown=1.0)), order)[:2] == [1, 2000]


def test_the_lowest_class_reads_its_prompts_beside_any_decoding_rows() -> None:
    order = [session("b"), session("p", 2000)]
    assert shares(room(order, times=known(LINEAR), policy=Policy(slowdown=1.0)), order) == [1, 2000]


def test_only_sessions_with_a_row_limit_a_chunk() -> None:
    """A thousand sessions decode, and eight of them have a row. The limit is that of a step with eight rows."""
    order = [
        session("p", 2000, priority="interactive"),
        *(session(f"i{n}", priority="interactive") for n in range(1000)),
    ]
    counts = shares(room(order, max_rows=8, times=known(LINEAR), policy=Policy(slowdown=1.5)), order)
    assert counts[:8] == [LEAST_CHUNK, *[1] * 7]
