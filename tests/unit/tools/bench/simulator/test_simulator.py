from __future__ import annotations

import msgspec
import pytest

from djinn_client import ModelInfo, Span
from djinnd.core.batch import Batch
from tools.bench.loads.course import outcome
from tools.bench.loads.load import Group, Load
from tools.bench.serving.fairness import farthest_from_weights, quotas
from tools.bench.simulator.__main__ import load_of, run
from tools.bench.simulator.check import Compared
from tools.bench.simulator.engine import Machine, SimulatedEngine, at
from tools.bench.simulator.load import simulate
from tools.bench.simulator.machines import H200_13B, Line, Ways, line, machine_of, rising, typical
from tools.bench.simulator.traced_steps import Step, steps_of

MACHINE = Machine(
    name="none",
    rows=((1, 0.01), (3, 0.03)),
    chunk=((0, 0.0), (100, 0.1)),
    call=0.002,
    page_size=16,
    page_bytes=1 << 20,
    pages=64,
    host_pages=256,
    up=1e9,
    down=1e9,
    max_context=512,
    max_tokens=256,
    max_rows=8,
)
ALONE = Group(priority="interactive", sessions=1, context=(101, 101), answer=(5, 5), calls=1, pause_s=(1e3, 1e3))
BUSY = Group(priority="batch", sessions=1, context=(8, 8), answer=(400, 400))
AGENTS = Group(
    priority="agent",
    sessions=8,
    context=(200, 200),
    prompt=(8, 8),
    answer=(4, 4),
    calls=5,
    pause_s=(1.0, 2.0),
    tells="signals",
)


def test_a_curve_is_straight_between_its_points_and_continues_its_last_line() -> None:
    curve = ((1.0, 10.0), (3.0, 20.0))
    assert [at(curve, x) for x in (0.0, 1.0, 2.0, 3.0, 5.0)] == [10.0, 10.0, 15.0, 20.0, 30.0]
    assert at(((1.0, 7.0),), 9.0) == 7.0


def test_one_session_alone_takes_the_machines_times() -> None:
    found = outcome(simulate(SimulatedEngine(MACHINE), Load(seconds=10, groups={"a": ALONE})), {}).groups["a"]
    assert found.calls == 1
    assert found.queued.p50 == pytest.approx(0.001)
    assert found.first_token.p50 == pytest.approx(0.001 + 0.01 + 0.1 + 0.001)
    assert (found.between_tokens.count, found.between_tokens.p50) == (4, pytest.approx(0.01))


def test_sessions_that_leave_the_device_come_back_over_the_bus() -> None:
    group = msgspec.structs.replace(AGENTS, tells="expected")
    found = run(MACHINE, Load(seconds=60, groups={"agents": group}))
    figures = found.outcome.groups["agents"]
    assert not figures.failures
    assert figures.wake_up.count > 20
    assert found.pages_moved["demote"] > 0 and found.pages_moved["promote"] > 0
    assert 0 < found.busy < 1


@pytest.mark.parametrize("forgets", [False, True])
def test_a_session_that_forgets_never_exceeds_its_context(forgets: bool) -> None:
    group = msgspec.structs.replace(ALONE, calls=12, prompt=(101, 101), pause_s=(0.0, 0.0), forgets=forgets)
    found = outcome(simulate(SimulatedEngine(MACHINE), Load(seconds=10, groups={"a": group})), {}).groups["a"]
    assert found.calls > 12
    assert list(found.failures) == ([] if forgets else ["prompt_too_long"])


@pytest.mark.parametrize("seed", range(5))
def test_a_crowd_that_fits_device_and_host_together_never_recomputes_kv(seed: int) -> None:
    group = Group(
        priority="agent",
        sessions=13,
        rate=1.0,
        context=(96, 96),
        prompt=(4, 4),
        answer=(4, 4),
        calls=5,
        pause_s=(20.0, 40.0),
        tells="signals",
    )
    machine = msgspec.structs.replace(MACHINE, pages=64, host_pages=64)
    length = 96 + 4 * 4 + 5 * 4
    pages = group.sessions * -(-length // machine.page_size)
    assert 0.9 < pages / (machine.pages + machine.host_pages) < 0.95
    engine = SimulatedEngine(machine)
    figures = outcome(simulate(engine, Load(seconds=600, groups={"agents": group}, seed=seed)), {}).groups["agents"]
    assert figures.calls == group.sessions * group.calls and not figures.failures
    assert engine.tokens == group.sessions * (length - 1)  # the last token of a session is never run


def test_tenants_share_device_time_by_weight() -> None:
    groups = {
        f"{tenant}": Group(priority="batch", sessions=count, tenants=(tenant,), context=(8, 8), answer=(16, 32))
        for tenant, count in ((1, 8), (2, 80))
    }
    load = Load(seconds=60, groups=groups, weights={1: 1.0, 2: 3.0})
    machine = msgspec.structs.replace(MACHINE, pages=1024)
    found = outcome(simulate(SimulatedEngine(machine), load), load.weights)
    assert sum(found.shares.values()) == pytest.approx(1.0)
    assert farthest_from_weights(found.shares, load.weights) < 0.05
    assert found.jain is not None and found.jain.worst > 0.97


def test_the_same_load_gives_the_same_course() -> None:
    load = msgspec.structs.replace(load_of("mix"), seconds=5.0)
    first, second = (outcome(simulate(SimulatedEngine(H200_13B), load), {}) for _ in range(2))
    assert first == second


def test_the_host_s_jitter_makes_steps_longer() -> None:
    load = Load(seconds=10, groups={"a": ALONE})
    slow = msgspec.structs.replace(MACHINE, jitter=(2.0,))
    found = outcome(simulate(SimulatedEngine(slow), load), {}).groups["a"]
    assert found.between_tokens.p50 == pytest.approx(0.02)


def test_a_step_is_longer_by_the_calls_that_are_heard_before_it() -> None:
    seen: list[float] = []
    engine = SimulatedEngine(msgspec.structs.replace(MACHINE, hearing=0.5))
    engine.ran = lambda batch, seconds: seen.append(seconds - sum(MACHINE.seconds(batch)))
    load = Load(seconds=10, groups={"a": msgspec.structs.replace(ALONE, sessions=2, answer=(3, 3))})
    simulate(engine, load)
    assert seen == pytest.approx([1.0, 0.0, 0.0])


def test_a_step_is_longer_by_the_bytes_that_are_copied_in_it() -> None:
    """Copies that wait for the step's end do not make it longer."""
    load = Load(seconds=60, groups={"agents": AGENTS, "busy": BUSY})
    for synchronous in (False, True):
        machine = msgspec.structs.replace(MACHINE, beside=1e-5 / MACHINE.page_bytes, synchronous=synchronous)
        longer = 0.0
        engine = SimulatedEngine(machine)

        def ran(batch: Batch, seconds: float) -> None:
            nonlocal longer
            longer += seconds - sum(MACHINE.seconds(batch))

        engine.ran = ran
        simulate(engine, load)
        pages = sum(engine.moved.values())
        assert pages > 20 and 0.9 < longer / (pages * 1e-5) <= 1.0 + 1e-9


def test_jitter_factors_repeat_in_their_order() -> None:
    seen: list[float] = []
    engine = SimulatedEngine(msgspec.structs.replace(MACHINE, jitter=(1.0, 2.0, 3.0)))
    engine.ran = lambda batch, seconds: seen.append(seconds / sum(MACHINE.seconds(batch)))
    simulate(engine, Load(seconds=10, groups={"a": ALONE}))
    assert seen == pytest.approx([1.0, 2.0, 3.0, 1.0, 2.0])


def test_a_call_in_the_middle_of_a_step_waits_for_the_steps_end() -> None:
    late = Group(priority="batch", sessions=30, rate=10.0, context=(1, 1), answer=(1, 1))
    load = Load(seconds=4, groups={"busy": BUSY, "late": late})
    found = outcome(simulate(SimulatedEngine(MACHINE), load), {}).groups["late"]
    assert found.queued.count > 20
    assert 0.001 + 0.003 < found.queued.mean < 0.001 + 0.010, "half a step, on average, and the way"


@pytest.mark.long
def test_copies_that_begin_when_a_step_is_over_come_later() -> None:
    load = Load(seconds=60, groups={"agents": AGENTS, "busy": BUSY})
    beside, after = (
        outcome(simulate(SimulatedEngine(one), load), {}).groups["agents"].wake_up
        for one in (MACHINE, msgspec.structs.replace(MACHINE, synchronous=True))
    )
    assert beside.count > 20 and after.mean > beside.mean + 0.003


def test_an_engine_serves_one_load_after_another() -> None:
    """The end of the first load cancels a running call and waiting agents."""
    engine = SimulatedEngine(MACHINE)
    simulate(engine, Load(seconds=2.05, groups={"agents": AGENTS, "busy": BUSY}))
    assert not engine.scheduler.sessions()
    began = engine.now
    found = outcome(simulate(engine, Load(seconds=10, groups={"a": ALONE})), {}).groups["a"]
    assert engine.now == began + 10
    assert (found.calls, found.first_token.p50) == (1, pytest.approx(0.001 + 0.01 + 0.1 + 0.001))
    engine.scheduler.check_integrity()


# --- what machines are made of ----------------------------------------------------------------------------------------


def test_a_line_goes_through_the_measured_points() -> None:
    found = line([(1e6, 0.003), (5e6, 0.007)])
    assert found.rate == pytest.approx(1e9) and found.seconds == pytest.approx(0.002)
    assert line([(1e6, 0.003), (5e6, 0.001)]) == Line(0.002, float("inf"))


def test_curves_never_fall() -> None:
    assert rising([(1, 2.0), (2, 1.0), (3, 4.0)]) == ((1, 2.0), (2, 2.0), (3, 4.0))


def test_one_disturbed_measurement_does_not_change_the_median() -> None:
    assert typical([Ways(0.9, 1.0, 5.0, 0.1), Ways(0.2, 3.0, 4.0, 0.2), Ways(0.1, 3.0, 9.0, 0.3)]) == Ways(
        0.2, 3.0, 5.0, 0.2
    )


def test_a_machines_steps_take_the_times_of_the_measured_steps() -> None:
    shaking = (0.9, 1.0, 1.0, 1.0, 1.1)
    plain = [Step(rows, 0, 0.01 * rows * times) for rows in (2, 4) for times in shaking * 20]
    prompts = [Step(2, further, (0.02 + further * 1e-3) * times) for further in (10, 100) for times in shaking * 8]
    others = [(calls, pages) for calls in (0, 1, 2) for pages in (0, 1, 5) if calls or pages]
    beside = [Step(2, 0, 0.02 + calls * 1e-3 + pages * 5e-4, calls, pages << 20) for calls, pages in others * 10]
    beside += [Step(2, 100, 0.12 + (chunks - 1) * 2e-3, chunks=chunks) for chunks in (1, 2, 3) for _ in range(10)]
    info = ModelInfo(
        name="m",
        path="",
        family="llama",
        state="ready",
        page_size=16,
        page_bytes=1 << 20,
        pages=64,
        host_pages=256,
        max_context=512,
    )
    found = machine_of([*plain, *prompts, *beside], Ways(0.002, 1e9, 2e9, 0.001), info, (256, 8), on_cpu=True)
    assert found.rows == ((2, pytest.approx(0.02)), (4, pytest.approx(0.04)))
    assert at(found.chunk, 10) == pytest.approx(0.01) and at(found.chunk, 100) == pytest.approx(0.1)
    assert found.jitter[:10] == shaking * 2, "as they came"
    assert found.hearing == pytest.approx(1e-3) and found.another == pytest.approx(2e-3)
    assert found.beside == pytest.approx(5e-4 / (1 << 20))
    assert set(found.jitter[-len(beside) :]) == {1.0}, "what calls, pages and others that read take is none"
    assert (found.call, found.up, found.down, found.moving) == (0.002, 1e9, 2e9, 0.001)
    assert found.synchronous and (found.max_tokens, found.max_rows) == (256, 8)


def test_a_step_lasts_until_the_next_one_begins() -> None:
    spans = [
        Span(track=track, name="", start_us=start, duration_us=1.0, args={"rows": rows, "tokens": tokens, "chunks": 1})
        for track, start, rows, tokens in (
            ("step", 30.0, 3, 3),
            ("copy", 5.0, 9, 9),
            ("step", 10.0, 2, 70),
            ("step", 45.0, 1, 1),
        )
    ]
    assert steps_of(spans) == [
        Step(2, 68, pytest.approx(20e-6), chunks=1),
        Step(3, 0, pytest.approx(15e-6), chunks=1),
    ]
    beside = [
        Span(track=track, name="", start_us=start, duration_us=50.0, args=args)
        for track, start, args in (
            ("host", 5.0, {"calls": 9}),
            ("host", 28.0, {"calls": 1}),
            ("host", 29.0, {"calls": 2}),
            ("host", 31.0, {}),
            ("copy", 31.0, {"bytes": 1000}),
            ("pages up", 32.0, {"bytes": 100}),
            ("pages down", 33.0, {"bytes": 10}),
            ("pages down", 46.0, {"bytes": 1}),
        )
    ]
    assert [(step.calls, step.copied) for step in steps_of([*beside, *spans])] == [(3, 0), (0, 110)]


def test_a_comparison_is_the_ratio_of_simulator_to_daemon() -> None:
    assert Compared("x", 2.0, 3.0).ratio == 1.5
    assert Compared("x", 0.0, 3.0).ratio == 1.0


# --- fairness ---------------------------------------------------------------------------------------------------------


def test_the_deviation_of_shares_is_relative_to_the_weights() -> None:
    assert farthest_from_weights({1: 0.25, 2: 0.75}, {1: 1.0, 2: 3.0}) == pytest.approx(0.0)
    assert farthest_from_weights({1: 0.3, 2: 0.7}, {1: 1.0, 2: 3.0}) == pytest.approx(0.2)
    assert farthest_from_weights({2: 1.0}, {1: 1.0, 2: 3.0}) == pytest.approx(1.0)


def test_a_weight_is_a_quota_of_a_user() -> None:
    assert quotas({3: 2.0}) == {"tenant-3": {"users": [61_003], "weight": 2.0}}
