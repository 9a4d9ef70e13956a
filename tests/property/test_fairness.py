"""Shares of the device on a virtual clock. No session starves, the device does not idle, lower classes do not delay
higher ones, tenants get their weights, and the same events give the same batches.

tests/support/virtual.py checks the invariants at each step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from djinn_client.protocol import CLASSES, Class
from djinnd.core.request import Request
from djinnd.scheduler.policy import Policy, Target
from djinnd.scheduler.tuning import FAIRNESS
from tests.support.virtual import VirtualDevice, rising

Curve = Callable[[int], float]
MODELS = ("m", "n")
WEIGHTS = st.dictionaries(st.integers(1, 4), st.integers(1, 10), min_size=2)
CURVES = [rising(0.01, 0.0), rising(0.01, 0.0002), rising(0.0, 0.001), rising(0.2, 0.0)]


@dataclass(frozen=True)
class Event:
    """After this many steps, a session is opened, asks again, changes its class, is held for ten steps, or is
    closed."""

    after: int
    kind: str
    who: int
    priority: Class
    tenant: int
    prompt: int
    max_tokens: int
    between: float | None
    deadline: float


EVENTS = st.builds(
    Event,
    after=st.integers(0, 120),
    kind=st.sampled_from(["open"] * 6 + ["ask", "class", "hold", "close"]),
    who=st.integers(0, 30),
    priority=st.sampled_from(CLASSES),
    tenant=st.integers(1, 4),
    prompt=st.sampled_from([1, 1, 7, 40, 200]),
    max_tokens=st.sampled_from([1, 10, 100, 1000]),
    between=st.sampled_from([None, None, None, float("inf"), 0.02]),
    deadline=st.sampled_from([float("inf"), float("inf"), 0.1, 5.0]),
)


def play(device: VirtualDevice, events: list[Event], models: int, steps: int = 160) -> None:
    held: dict[Request, int] = {}  # the step until which each is held
    for step in range(steps):
        for event in sorted((event for event in events if event.after == step), key=repr):
            happen(device, event, models, held, step)
        for request in [request for request, until in held.items() if until == step]:
            device.release(request)
            del held[request]
        device.step()


def happen(device: VirtualDevice, event: Event, models: int, held: dict[Request, int], step: int) -> None:
    sessions = list(device.scheduler.sessions())
    if event.kind == "open":
        name = f"s{step}-{len(sessions)}-{len(device.rows)}"
        model = MODELS[event.who % models]
        device.open(
            name,
            event.priority,
            event.tenant,
            event.prompt,
            event.max_tokens,
            model,
            deadline=device.now + event.deadline,
            between_tokens=event.between,
        )
        return
    if not sessions:
        return
    session = sessions[event.who % len(sessions)]
    request = session.request
    if event.kind == "ask" and request is None:
        device.ask(session, event.prompt, event.max_tokens)
    elif event.kind == "class":
        device.scheduler.set_class(session.id, event.priority)
    elif event.kind == "hold" and request is not None and request not in held:
        device.scheduler.hold(request.id)
        held[request] = step + 10
    elif event.kind == "close":
        device.scheduler.close(session.id)
        if request is not None:
            held.pop(request, None)


SITES = st.fixed_dictionaries(
    {
        "seconds": st.sampled_from(CURVES),
        "pages": st.sampled_from([100, 1 << 12]),
        "max_tokens": st.sampled_from([4, 64, 512]),
        "max_rows": st.sampled_from([1, 3, 8]),
        "weights": WEIGHTS,
        "policy": st.builds(
            Policy,
            targets=st.fixed_dictionaries(
                {
                    priority: st.builds(
                        Target, st.sampled_from([0.005, 0.05, math.inf]), st.sampled_from([0.1, math.inf])
                    )
                    for priority in CLASSES
                }
            ),
            ageing=st.sampled_from([0.1, 1.0, 10.0]),
        ),
    }
)


@given(site=SITES, events=st.lists(EVENTS, min_size=5, max_size=40), models=st.integers(1, 2))
@settings(max_examples=60)
def test_sessions_do_not_starve_and_the_device_does_not_idle(site: dict, events: list[Event], models: int) -> None:  # type: ignore[type-arg]
    play(VirtualDevice(*MODELS[:models], **site), events, models)


@given(site=SITES, events=st.lists(EVENTS, min_size=5, max_size=40), models=st.integers(1, 2))
@settings(max_examples=12)
def test_the_same_events_give_the_same_batches(site: dict, events: list[Event], models: int) -> None:  # type: ignore[type-arg]
    first, second = (VirtualDevice(*MODELS[:models], **site) for _ in range(2))
    play(first, events, models)
    play(second, events, models)
    assert first.batches == second.batches and first.now == second.now


# --- shares ---------------------------------------------------------------------------------------------------------


def jain(values: list[float]) -> float:
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


class Shared:
    """A device with one row in each step and no ageing, so that every tenant wants more than it gets."""

    def __init__(self, weights: Mapping[int, float], curve: Curve, models: int = 1) -> None:
        never = Policy(ageing=1e9)
        self.device = VirtualDevice(*MODELS[:models], weights=weights, max_rows=1, seconds=curve, policy=never)
        self.weights = weights
        self.slack = max(
            (FAIRNESS.seat_s + 2 * curve(self.device.scheduler.max_batch_tokens)) / w for w in weights.values()
        )
        self._before: dict[int, float] = {}
        self.mark()

    def mark(self) -> None:
        """Begins to count what tenants get."""
        self._before = {tenant: self.device.used["agent", tenant] for tenant in self.weights}

    def had(self, tenant: int) -> float:
        """Seconds of the device since `mark`, divided by weight."""
        return (self.device.used["agent", tenant] - self._before[tenant]) / self.weights[tenant]

    def check(self) -> None:
        had = [self.had(tenant) for tenant in self.weights]
        assert max(had) - min(had) <= self.slack


@given(
    weights=WEIGHTS,
    sessions=st.lists(st.integers(1, 12), min_size=4, max_size=4),
    prompts=st.lists(st.sampled_from([1, 1, 30, 2000]), min_size=4, max_size=4),
    curve=st.sampled_from([rising(0.05, 0.0), rising(0.04, 0.0005)]),
    models=st.integers(1, 2),
)
@settings(max_examples=12)
def test_tenants_get_device_time_by_their_weights_however_many_sessions_they_have(
    weights: dict[int, float], sessions: list[int], prompts: list[int], curve: Curve, models: int
) -> None:
    """Their sessions may be on different models."""
    shared = Shared(weights, curve, models)
    for tenant, count, prompt in zip(weights, sessions, prompts, strict=False):
        for number in range(count):
            model = MODELS[(tenant + number) % models]
            shared.device.open(f"{tenant}-{number}", tenant=tenant, prompt=prompt, model=model)
    for _ in range(40):
        shared.device.run(0.25)
        shared.check()
    shared.mark()
    shared.device.run(10.0)
    assert jain([shared.had(tenant) for tenant in weights]) >= 0.97


@given(
    weights=st.tuples(st.integers(1, 10), st.integers(1, 10)),
    alone=st.sampled_from([0.1, 30.0, 3000.0]),
    curve=st.sampled_from([rising(0.05, 0.0), rising(0.02, 0.0)]),
    models=st.integers(1, 2),
    returns=st.booleans(),
)
@settings(max_examples=15)
def test_a_tenant_that_comes_late_has_saved_up_little_and_neither_starves(
    weights: tuple[int, int], alone: float, curve: Curve, models: int, returns: bool
) -> None:
    """One tenant has the device alone for long; then another joins it, on the same model or on another one."""
    shared = Shared({1: weights[0], 2: weights[1]}, curve, models)
    device = shared.device
    late = device.open("late", tenant=2, max_tokens=1, model=MODELS[models - 1])
    if returns:
        device.run(1.0)
    device.open("first", tenant=1)
    device.scheduler.shares.charge("agent", 1, alone)
    device.run(0.5)
    if returns:
        device.ask(late)
    else:
        device.open("newcomer", tenant=2, model=MODELS[models - 1])
    shared.mark()
    until = device.now + 8.0
    while device.now < until:
        device.run(0.2)
        ahead = shared.had(2) - shared.had(1)
        assert -shared.slack <= ahead <= FAIRNESS.lag_s / weights[0] + shared.slack


def test_a_tenant_that_wants_little_gets_it_at_once_and_saves_up_nothing() -> None:
    """The tenant runs one session for long, beside another tenant that fills the device, and then opens many."""
    shared = Shared({1: 1, 2: 1}, rising(0.05, 0.0))
    device = shared.device
    for number in range(20):
        device.open(f"busy-{number}", tenant=1)
    for number in range(20):
        device.open(f"short-{number}", tenant=2, max_tokens=1)
        device.run(1.0)
        assert device.rows[f"short-{number}"] == 1
    shared.mark()
    for number in range(20):
        device.open(f"many-{number}", tenant=2)
    for _ in range(20):
        device.run(0.5)
        assert abs(shared.had(1) - shared.had(2)) <= FAIRNESS.lag_s + shared.slack


@given(data=st.data(), step_s=st.sampled_from([0.01, 0.5]))
@settings(max_examples=12)
def test_a_batch_session_goes_on_under_endless_work_of_higher_classes(data: st.DataObject, step_s: float) -> None:
    """The batch session is on its own model or on another one, and clocks have any values."""
    device = VirtualDevice(*MODELS, seconds=rising(step_s, 0.0), max_rows=2, policy=Policy(ageing=1.0))
    for number in range(data.draw(st.integers(1, 6))):
        priority, model = data.draw(st.sampled_from(CLASSES[:2])), data.draw(st.sampled_from(MODELS))
        device.open(f"high-{number}", priority, tenant=data.draw(st.integers(1, 3)), model=model)
    for number in range(data.draw(st.integers(1, 3))):
        device.open(f"batch-{number}", "batch", tenant=4, model=data.draw(st.sampled_from(MODELS)))
    device.scheduler.shares.charge(data.draw(st.sampled_from(CLASSES)), 4, 1000.0)
    for _ in range(200):
        device.step()  # this asserts that no session waits longer than ageing allows
