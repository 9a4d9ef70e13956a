"""Decides which requests may have killed an engine that has died.

The cause is a guess. A request that has produced a token on that engine can be computed, and a waiting request was not
in the step. So the requests without a token are blamed, if there are any. If a model was being loaded, no request is
blamed, because loads kill engines more often.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

MOST_DEATHS = 2  # of engines that are blamed on a request before it fails


class RunProgress(IntEnum):
    """State of a request on one engine."""

    WAITS = 0  # held or paused: it has no row in a step
    PROVEN = 1  # it has produced a token
    UNPROVEN = 2  # it has produced no token yet


class Suspect(NamedTuple):
    """A request, or the load of a model, that may have killed an engine."""

    model: str
    user: int | None  # the request's; None: the model was being loaded


def blamed_progress(progress_of_runs: Collection[RunProgress], loads: bool) -> RunProgress | None:
    """The progress of the requests that are blamed for an engine's death; None if no request is blamed. `loads`: a
    model was being loaded."""
    worst = max(progress_of_runs, default=RunProgress.WAITS)
    return None if loads or worst is RunProgress.WAITS else worst
