"""Counts for each user the engines that died over models that the user has brought.

A user may bring the same harmful model under new names. Each name is set aside after two deaths, and the next name
kills the next engines. So deaths count for the user too. A user with too many of them may not load its own models for a
while; configured models stay usable. Callers give the times, in seconds.
"""

from __future__ import annotations

from djinn_client.errors import QuotaExceeded
from djinnd.config import Limits


class UserDeaths:
    """Stores the latest deaths for each user, at most as many as the limit. `limits` may be replaced."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._deaths: dict[int, list[float]] = {}

    def count(self, user: int, at: float) -> None:
        """Counts a death for which only models or requests of this user are blamed."""
        recent = [death for death in self._deaths.get(user, ()) if at - death <= self.limits.engine_deaths_window]
        self._deaths[user] = [*recent, at][-self.limits.engine_deaths_per_user :]

    def expect_load(self, user: int, at: float) -> None:
        """Checks that models that this user has brought may be loaded. Raises QuotaExceeded."""
        deaths, limit = self._deaths.get(user, []), self.limits.engine_deaths_per_user
        if len(deaths) < limit or (left := deaths[-1] + self.limits.engine_deaths_window - at) <= 0:
            return
        raise QuotaExceeded(
            f"{len(deaths)} engines have died over models of the user that brought this one, and "
            f"limits.engine_deaths_per_user is {limit}: such models are loaded again in {left:.0f} s; configured "
            "models are served as before",
            quota="engine_deaths_per_user",
            rule="",
            limit=limit,
            used=len(deaths),
            retry_s=round(left, 3),
        )
