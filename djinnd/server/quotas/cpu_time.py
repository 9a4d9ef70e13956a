"""The CPU time that processes have used for each user, and how much of it a minute allows."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from djinn_client.errors import QuotaExceeded
from djinn_client.protocol.fields.scheduling import ResourceUse
from djinnd.server.quotas.bucket import Bucket

_MINUTE = 60.0


class CpuTime:
    """Limits the CPU time of users. `limit`: the limit's name; `what`: the work that it is for; `rate`: CPU seconds
    that a user may use per minute."""

    def __init__(self, limit: str, what: str, rate: float) -> None:
        self._limit = limit
        self._what = what
        self._rate = rate
        self._used: dict[int, _Use] = {}  # by user

    def follow(self, rate: float) -> None:
        """Applies a new rate."""
        self._rate = rate
        for use in self._used.values():
            use.bucket.resize(rate / _MINUTE, rate, time.monotonic())

    def expect(self, user: int) -> None:
        """Checks that the user has CPU time left. Raises QuotaExceeded."""
        wait = self._use(user).bucket.wait_s(time.monotonic())
        if wait:
            raise QuotaExceeded(
                f"your {self._what} have used their {self._rate:g} s of CPU time a minute (limits.{self._limit}): try "
                f"again in {math.ceil(wait)} s",
                quota=self._limit,
                limit=self._rate,
                retry_s=wait,
            )

    def charge(self, user: int, seconds: float) -> None:
        """Charges the user for CPU time."""
        use = self._use(user)
        use.seconds += seconds
        use.bucket.take(seconds, time.monotonic())

    def use(self, user: int) -> ResourceUse:
        """The CPU time that counts against the user's limit, and the limit, in whole seconds."""
        level = self._used[user].bucket.level(time.monotonic()) if user in self._used else self._rate
        return ResourceUse(self._limit, math.ceil(self._rate - level), math.ceil(self._rate))

    def seconds(self, user: int) -> float:
        """CPU time used for the user since the daemon started."""
        return self._used[user].seconds if user in self._used else 0.0

    def _use(self, user: int) -> _Use:
        if user not in self._used:
            self._used[user] = _Use(Bucket(self._rate / _MINUTE, self._rate, time.monotonic()))
        return self._used[user]


@dataclass(slots=True)
class _Use:
    """The CPU time of one user."""

    bucket: Bucket  # the seconds that the user may still use
    seconds: float = 0.0  # used since the daemon started
