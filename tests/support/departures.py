"""Who is to leave the device does, as beside the steps of an engine."""

from __future__ import annotations

from djinnd.scheduler.residence import Residence
from djinnd.scheduler.scheduler import Scheduler


def all_leave(idle: Scheduler | Residence) -> None:
    while idle.depart():
        pass
