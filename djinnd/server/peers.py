"""Who is at the other end of a Unix socket, on the kernel's word, and whether that word says who.

In a user namespace (a rootless container, `userns-remap`) SO_PEERCRED gives one and the same number, the overflow uid,
for all users of the host that the namespace does not map. They would be one tenant, so they are refused.
"""

from __future__ import annotations

import socket
import struct
from pathlib import Path
from typing import NamedTuple

_PEER = struct.Struct("3i")  # struct ucred: pid, uid, gid
_EVERYBODY = ["0", "0", "4294967295"]  # uid_map where all users are mapped
_UID_MAP = Path("/proc/self/uid_map")
_OVERFLOW_UID = Path("/proc/sys/kernel/overflowuid")

UNKNOWN = (
    "the daemon runs in a user namespace that does not map your user, so it cannot tell you from other users: have its "
    "administrator map your uid into the namespace, or run djinnd outside of one"
)


class Peer(NamedTuple):
    pid: int
    user: int

    @classmethod
    def of(cls, sock: socket.socket) -> Peer:
        pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
        return cls(pid, uid)


def nobody_in_particular(uid_map: Path = _UID_MAP, overflow_uid: Path = _OVERFLOW_UID) -> int | None:
    """The uid that stands for all users that this process's user namespace does not map; None where all are mapped."""
    if uid_map.read_text().split() == _EVERYBODY:
        return None
    return int(overflow_uid.read_text())
