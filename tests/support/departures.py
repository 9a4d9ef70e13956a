"""Evicts the sessions that are due to leave, as an engine does while it steps."""

from __future__ import annotations

from djinnd.scheduler.residence.kv_residency import Residence
from djinnd.scheduler.scheduler import Scheduler


def all_leave(idle: Scheduler | Residence) -> None:
    while idle.depart():
        pass
