"""Which requests may have killed an engine that has died.

Nobody can know it. But a request that has given a token on that engine has shown that it can, and one that waits was
not in the step. So the requests without a token yet are blamed, where there are any. No request is blamed where a model
was being loaded: a load kills engines more often.
"""

from __future__ import annotations

from collections.abc import Collection
from enum import IntEnum
from typing import NamedTuple

MOST_DEATHS = 2  # of engines for which one request may be blamed before it ends


class Standing(IntEnum):
    """Of a request on one engine."""

    WAITS = 0  # held or paused: it has no row
    PROVEN = 1  # it has given a token
    UNPROVEN = 2  # it has given none yet


class Suspect(NamedTuple):
    """A request, or the load of a model, that may have killed an engine."""

    model: str
    user: int | None  # of the request; None: the model was being loaded


def blamed_standing(standings: Collection[Standing], loads: bool) -> Standing | None:
    """The requests with this standing are blamed for the death. None: no request is. `loads`: a model was being
    loaded."""
    worst = max(standings, default=Standing.WAITS)
    return None if loads or worst is Standing.WAITS else worst
