"""Free memory and disk space of this host for pages that have left the device."""

from __future__ import annotations

from djinn_client.transport.host_memory import available
from djinnd.engine.memory.memory import HostRoom
from djinnd.kvcache.page_file import free_bytes

_SHM = "/dev/shm"


def host_room(disk_folder: str, promised: int = 0) -> HostRoom:
    """`disk_folder` "": no disk tier. `promised`: bytes of host memory that are reserved but not touched yet; the
    kernel still counts them as available."""
    memory = max((available() or 0) - promised, 0)
    return HostRoom(memory, free_bytes(_SHM), free_bytes(disk_folder) if disk_folder else 0)
