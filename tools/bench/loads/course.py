"""The events of a load and their figures, in one form for a daemon and for the simulator."""

from __future__ import annotations

import statistics
from array import array
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from djinn_client.protocol.fields.scheduling import Spread
from tools.bench.harness.spread import spread

WINDOW_S = 10.0


def _seconds() -> array[float]:
    return array("d")


@dataclass
class Tally:
    """Times of one group, in seconds. `wake_up`: first tokens after a pause that the daemon was told of."""

    first_token: array[float] = field(default_factory=_seconds)
    between_tokens: array[float] = field(default_factory=_seconds)
    wake_up: array[float] = field(default_factory=_seconds)
    queued: array[float] = field(default_factory=_seconds)  # until the call's first row; only the simulator knows it
    calls: int = 0
    failures: Counter[str] = field(default_factory=Counter)  # calls without an answer, by reason

    def add(self, other: Tally) -> None:
        self.first_token += other.first_token
        self.between_tokens += other.between_tokens
        self.wake_up += other.wake_up
        self.queued += other.queued
        self.calls += other.calls
        self.failures += other.failures


class Course:
    """The events of a load. `began` is on the same clock as all times."""

    def __init__(self, began: float) -> None:
        self.began = began
        self.ended = began
        self.groups: defaultdict[str, Tally] = defaultdict(Tally)
        self.tokens: Counter[tuple[int, int]] = Counter()  # generated tokens, by tenant and window
        self.work: Counter[tuple[int, int]] = Counter()  # with prompt tokens, which count at the first token
        self.device_s: Counter[tuple[int, int]] = Counter()  # device time, likewise; only the simulator knows it

    def window(self, now: float) -> int:
        return int((now - self.began) / WINDOW_S)

    def token(self, group: str, tenant: int, before: float | None, now: float) -> None:
        """Counts a token. `before` is when the call's last token came; None: this is the first."""
        at = tenant, self.window(now)
        self.tokens[at] += 1
        self.work[at] += 1
        if before is not None:
            self.groups[group].between_tokens.append(now - before)

    def first(
        self, group: str, tenant: int, prompt: int, asked: float, now: float, wakes: bool, started: float | None = None
    ) -> None:
        """Counts a call's first token and its `read` prompt tokens, and also calls `token`."""
        self.work[tenant, self.window(now)] += prompt
        tally = self.groups[group]
        tally.calls += 1
        tally.first_token.append(now - asked)
        if wakes:
            tally.wake_up.append(now - asked)
        if started is not None:
            tally.queued.append(started - asked)


def pooled(courses: Sequence[Course]) -> Course:
    """Joins courses as if each had followed the one before."""
    whole = Course(0.0)
    for course in courses:
        for name, tally in course.groups.items():
            whole.groups[name].add(tally)
        first = whole.window(whole.ended)
        for served, others in (
            (whole.tokens, course.tokens),
            (whole.work, course.work),
            (whole.device_s, course.device_s),
        ):
            served.update({(tenant, first + window): amount for (tenant, window), amount in others.items()})
        whole.ended += course.ended - course.began
    return whole


class Figures(msgspec.Struct, kw_only=True):
    """Figures of one group."""

    calls: int
    failures: dict[str, int]
    queued: Spread
    first_token: Spread
    between_tokens: Spread
    wake_up: Spread


class Outcome(msgspec.Struct, kw_only=True):
    seconds: float
    tokens: int  # generated
    groups: dict[str, Figures]
    tenant_tokens: dict[int, int]
    shares: dict[int, float]  # of the device's time, or of tokens if that is unknown
    jain: Spread | None = None  # over windows, of tenants by weight; None: one tenant only, or no whole window

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def outcome(course: Course, weights: Mapping[int, float], first_window: int = 1) -> Outcome:
    """`first_window` is the first window that counts for fairness."""
    served: Mapping[tuple[int, int], float] = course.device_s or course.work
    tenants = sorted({tenant for tenant, _ in course.tokens})
    of_tenants = {tenant: sum(course.tokens[at] for at in course.tokens if at[0] == tenant) for tenant in tenants}
    whole = range(first_window, course.window(course.ended))
    counted = {t: sum(served.get((t, window), 0.0) for window in whole) for t in tenants}
    total = sum(counted.values())
    return Outcome(
        seconds=course.ended - course.began,
        tokens=sum(of_tenants.values()),
        groups={name: _figures(tally) for name, tally in course.groups.items()},
        tenant_tokens=of_tenants,
        shares={tenant: seconds / total if total else 0.0 for tenant, seconds in counted.items()},
        jain=fairness(served, tenants, weights, whole) if len(tenants) > 1 and whole else None,
    )


def _figures(tally: Tally) -> Figures:
    return Figures(
        calls=tally.calls,
        failures=dict(tally.failures),
        queued=spread(tally.queued),
        first_token=spread(tally.first_token),
        between_tokens=spread(tally.between_tokens),
        wake_up=spread(tally.wake_up),
    )


def jain(values: Sequence[float]) -> float:
    """Jain's index (Jain, Chiu and Hawe 1984): 1 if all values are equal, 1/n if one has everything; 1 without
    values."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0


def fairness(
    served: Mapping[tuple[int, int], float],
    tenants: Collection[int],
    weights: Mapping[int, float],
    windows: Iterable[int],
) -> Spread:
    """Jain's index of tenants' shares by weight, one for each window. `worst` is the lowest, and percentiles count from
    the highest down."""
    found = [jain([served.get((t, window), 0.0) / weights.get(t, 1.0) for t in tenants]) for window in windows]
    lost = spread([1.0 - index for index in found])
    return Spread(lost.count, statistics.fmean(found), 1 - lost.p50, 1 - lost.p90, 1 - lost.p99, worst=1 - lost.worst)
