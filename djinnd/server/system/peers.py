"""The process and user at the other end of a Unix socket, as the kernel reports them, and whether that number
identifies one user.

In a user namespace (a rootless container, `userns-remap`) SO_PEERCRED reports all users of the host that the namespace
does not map by one number, the overflow uid. They would be one tenant, so they are refused.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import NamedTuple

_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_EVERYBODY = ["0", "0", "4294967295"]  # content of uid_map if all users are mapped
_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")

UNKNOWN = (
    "the daemon runs in a user namespace that does not map your user, so it cannot tell you from other users: have its "
    "administrator map your uid into the namespace, or run djinnd outside of one"
)


class Peer(NamedTuple):
    """The process at the other end of a connection."""

    pid: int
    user: int

    @classmethod
    def of(cls, sock: socket.socket) -> Peer:
        pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return cls(pid, uid)


def unmapped_uid(uid_map: Path = _UID_MAP, overflow_uid: Path = _OVERFLOW_UID) -> int | None:
    """The uid that stands for all users that this process's user namespace does not map; None if all are mapped."""
    if uid_map.read_text().split() == _EVERYBODY:
        return None
    return int(overflow_uid.read_text())
