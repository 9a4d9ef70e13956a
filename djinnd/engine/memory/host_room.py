"""Free memory and disk space of this host for pages that have left the device."""

from __future__ import annotations

import os

from djinn_client.transport.host_memory import available
from djinnd.engine.memory.memory import HostRoom

_SHM = "/dev/shm"


def host_room(disk_folder: str, promised: int = 0) -> HostRoom:
    """`disk_folder` "": no disk tier. `promised`: bytes of host memory that are reserved but not touched yet; the
    kernel still counts them as available."""
    memory = max((available() or 0) - promised, 0)
    return HostRoom(memory, _free_in(_SHM), _free_in(disk_folder) if disk_folder else 0)


def _free_in(folder: str) -> int:
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize
