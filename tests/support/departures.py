"""Evicts the sessions that are due to leave, as an engine does while it steps."""

from __future__ import annotations

from djinnd.scheduler.residency.kv_residency import KvResidency
from djinnd.scheduler.scheduler import Scheduler


def all_leave(idle: Scheduler | KvResidency) -> None:
    while idle.depart():
        pass
