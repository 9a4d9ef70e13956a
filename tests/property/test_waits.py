"""Learned waits, checked against the same formulas applied to the whole history."""

from __future__ import annotations

from unittest import mock

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from djinnd.scheduler import waits as waits_module
from djinnd.scheduler.waits import KNOWN_AFTER, Waits

SESSIONS, TENANTS, TOOLS = ("a", "b", "c"), (1, 2), ("", "search", "read")
MOST_TOOLS = 3


class WaitsMachine(RuleBasedStateMachine):
    """`history`: the waits of each tool, the most recently used tool last."""

    def __init__(self) -> None:
        super().__init__()
        self.limit = mock.patch.object(waits_module, "MOST_TOOLS", MOST_TOOLS)
        self.limit.start()
        self.waits = Waits()
        self.now = 0.0
        self.open: dict[str, tuple[tuple[int, str], float]] = {}
        self.history: dict[tuple[int, str], list[float]] = {}

    def teardown(self) -> None:
        self.limit.stop()

    @rule(seconds=st.floats(0.0, 1e4))
    def go_by(self, seconds: float) -> None:
        self.now += seconds

    @rule(session=st.sampled_from(SESSIONS), tenant=st.sampled_from(TENANTS), tool=st.sampled_from(TOOLS))
    def begin(self, session: str, tenant: int, tool: str) -> None:
        self.waits.begin(session, tenant, tool, self.now)
        self.open[session] = ((tenant, tool), self.now)

    @rule(session=st.sampled_from(SESSIONS))
    def end(self, session: str) -> None:
        told = self.waits.end(session, self.now)
        if session not in self.open:
            assert told == []
            return
        key, since = self.open.pop(session)
        seen = self.history[key] = [*self.history.pop(key, []), self.now - since]
        while len(self.history) > MOST_TOOLS:
            del self.history[next(iter(self.history))]
        expected = self.waits.expected(*key)
        newly_known = len(seen) == KNOWN_AFTER and expected is not None
        alike = [(other, since) for other, (of, since) in self.open.items() if of == key]
        assert sorted(told) == sorted((*other, expected) for other in alike if newly_known)

    @rule(tenant=st.sampled_from(TENANTS), tool=st.sampled_from(TOOLS))
    def ask(self, tenant: int, tool: str) -> None:
        expected = self.waits.expected(tenant, tool)
        seen = self.history.pop((tenant, tool), [])
        if seen:
            self.history[tenant, tool] = seen
        if len(seen) < 3:
            assert expected is None
        elif expected is not None:
            assert 0.0 <= expected <= max(seen) * (1 + 1e-9)
        assert len(self.waits._tools) <= MOST_TOOLS


TestWaits = WaitsMachine.TestCase
TestWaits.settings = settings(max_examples=50, stateful_step_count=60)


@given(st.lists(st.floats(1.0, 100.0), min_size=3, max_size=8))
def test_the_first_few_waits_count_alike(took: list[float]) -> None:
    waits = Waits()
    for each in took:
        waits.begin("s", 1, "", 0.0)
        waits.end("s", each)
    means = [sum(took[: n + 1]) / (n + 1) for n in range(len(took))]
    errors = [abs(each - mean) for each, mean in zip(took[1:], means[:-1], strict=True)]
    deviation = sum(errors) / len(errors)
    expected = waits.expected(1, "")
    if expected is None:
        assert deviation > means[-1] * (1 - 1e-9)
    else:
        assert abs(expected - (means[-1] - deviation)) <= 1e-6 * max(took)


@given(st.floats(0.01, 1e4), st.integers(3, 40), st.floats(0.0, 0.2), st.randoms(use_true_random=False))
def test_a_steady_tool_is_expected_a_little_early_and_never_late(
    mean: float, count: int, spread: float, r: object
) -> None:
    waits = Waits()
    for _ in range(count):
        waits.begin("s", 1, "", 0.0)
        waits.end("s", mean * r.uniform(1 - spread, 1 + spread))  # type: ignore[attr-defined]
    expected = waits.expected(1, "")
    assert expected is not None
    assert mean * (1 - 3 * spread) * (1 - 1e-9) <= expected <= mean * (1 + spread) * (1 + 1e-9)
