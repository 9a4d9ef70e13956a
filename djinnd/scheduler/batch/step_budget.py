"""The time limits of a step, which follow from latency targets, and a budget that counts what is left of them.

A step may take as long as the tightest target between tokens of the sessions that decode. All sessions of a class that
decode share a step. The rest of its time goes to chunks of prompts, and then to lower classes. A class with a recent
call is protected in the same way, because its next call cannot interrupt a step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from djinn_client.protocol import CLASSES, Class
from djinnd.scheduler.timing.step_times import StepTimes
from djinnd.scheduler.tuning import STEP


class StepLimits(NamedTuple):
    """The longest steps in seconds that sessions of a class may make."""

    rows: float = math.inf  # with any of their rows: the targets of higher classes
    chunks: float = math.inf  # with chunks of their prompts: also the targets of their own class


def step_limits(
    recent: Mapping[Class, float], decoding: Mapping[Class, float], lateness: Mapping[Class, float]
) -> dict[Class, StepLimits]:
    """The limits of each class.

    `recent`: the tightest target between tokens of each class that had a call of late. `decoding`: the same of the
    class's sessions that decode now. `lateness`: how long the class's first tokens have waited, as a multiple of their
    target. If some are late, the tokens of the same class become late, too.
    """
    limits, longest = {}, math.inf
    for priority in CLASSES:
        stretch = min(max(lateness.get(priority, 0.0), 1.0), STEP.latest)
        own = STEP.headroom * decoding.get(priority, math.inf) * stretch
        limits[priority] = StepLimits(longest, min(longest, own))
        longest = min(longest, STEP.headroom * recent.get(priority, math.inf))
    return limits


class StepBudget:
    """Counts the rows, tokens and seconds that a step has left, while sessions are considered in serving order.

    The first session that is considered gets a token in any case. If rows that decode miss their target by themselves,
    as on a slow device, the step may take `STEP.overrun` times as long as they do.
    """

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        times: StepTimes,
        limits: Mapping[Class, StepLimits],
        decoding: Mapping[Class, int],
    ) -> None:
        """`decoding`: how many sessions of each class need one token."""
        self._times = times
        self._limits = limits
        self._rows = max_rows  # rows left
        self._tokens = max_tokens  # tokens left
        self._decoding = dict(decoding)  # sessions that decode and have no row yet, by class
        self._taken = self._further = 0  # rows taken, and their tokens beyond one each
        self._overrun = math.inf  # longest step in seconds for rows of higher classes that miss their target
        self._enter(CLASSES[0])

    def _enter(self, priority: Class) -> None:
        """Begins a class, and computes the longest steps that its rows and its chunks may make."""
        self._priority = priority
        limits, taken, further = self._limits[priority], self._taken, self._further
        self._overrun = min(self._overrun, STEP.overrun * self._times.predict(taken, further)) if taken else math.inf
        self._limit = max(limits.rows, self._overrun if taken else STEP.overrun * self._times.predict(1))
        if taken and not further and self._limit < math.inf and self._times.wants(taken):
            self._times.ask(taken)
            self._limit = -math.inf  # nothing joins: these rows are measured alone
        self._owed = 0 if taken else STEP.least_chunk
        own = min(self._decoding[priority], self._rows, self._tokens)
        alone = self._times.predict(taken + own, further)
        self._chunk_limit = min(self._limit, max(limits.chunks, STEP.overrun * alone))
        self._measure()

    def _measure(self) -> None:
        """Computes how many rows the step may have, and how many tokens of a chunk it may take beside all sessions of
        the class that decode."""
        within = self._times.rows_within(self._limit, self._further)
        self._most_rows = max(within, int(not self._taken))
        decoding = min(self._decoding[self._priority], self._rows, max(self._most_rows - self._taken, 0))
        further = self._times.further_within(self._chunk_limit, self._taken + decoding + 1) - self._further
        self._chunk = max(further + 1 if further > 0 else 0, self._owed)

    @property
    def is_full(self) -> bool:
        return not (self._rows and self._tokens)

    @property
    def spare(self) -> int:
        """How many tokens of guesses the step has room for, when all of its rows have been chosen."""
        return max(min(self._tokens, self._times.further_within(self._chunk_limit, self._taken) - self._further), 0)

    def share(self, priority: Class, remaining: int) -> int:
        """How many of a session's `remaining` tokens this step has room for; 0 if none."""
        if priority != self._priority:
            self._enter(priority)
        if self.is_full:
            return 0
        if remaining == 1:
            return int(self._taken < self._most_rows)
        # The first session considered gets a token, even if sessions that decode would fill the step.
        spared = 0 if self._taken else 1
        reserved = min(self._decoding[priority], self._rows - spared, self._tokens - spared)
        if reserved == self._rows:
            return 0
        return max(min(remaining, self._tokens - reserved, self._chunk), 0)

    def ones(self, priority: Class) -> int:
        """How many rows of one token this step has room for."""
        if priority != self._priority:
            self._enter(priority)
        return max(min(self._most_rows - self._taken, self._rows, self._tokens), 0)

    def take_ones(self, priority: Class, count: int) -> None:
        """Takes `count` rows of one token."""
        self._taken += count
        self._tokens -= count
        self._rows -= count
        self._decoding[priority] -= count

    def take(self, remaining: int, count: int) -> None:
        """Takes a row of `count` tokens, after `share` was asked for a session with `remaining` tokens."""
        self._taken += 1
        self._further += count - 1
        self._tokens -= count
        self._rows -= 1
        if remaining == 1:
            self._decoding[self._priority] -= 1
        else:
            self._owed = max(self._owed - count, 0)
            self._measure()
