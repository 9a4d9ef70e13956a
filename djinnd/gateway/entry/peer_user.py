"""Asks the kernel for the Unix user at the other end of a TCP connection on this machine.

Every user of a machine can connect to 127.0.0.1. A request without a token acts as the gateway's own user, so it has to
come from a process of that user or of root. The kernel is asked by sock_diag(7) for the one socket that has the peer's
address as its own: about 0.06 ms, however many sockets there are.
"""

from __future__ import annotations

import os
import socket
import struct

Address = tuple[str, int]

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST = 20, 1
_HEADER = struct.Struct("=IHHII")  # struct nlmsghdr: length, type, flags, sequence, port
_REQUEST = struct.Struct("=BBBBI")  # struct inet_diag_req_v2, without its socket: family, protocol, …, states
_REST = struct.Struct("=III")  # of the socket: its interface, and no cookie
_OWNER = struct.Struct("=II")  # uid and inode, of struct inet_diag_msg
_OWNER_AT = _HEADER.size + 64
_NO_COOKIE = 0xFFFFFFFF


def is_own(peer: Address, here: Address) -> bool:
    """True if the connection between these two addresses of this machine comes from this process's user, or from root.
    False where the kernel does not say."""
    return uid_of(peer, here) in (os.geteuid(), 0)


def uid_of(peer: Address, here: Address) -> int | None:
    """None for a socket that its process has closed, and where the kernel does not say."""
    try:
        return _owner(_asked(_question(peer, here)))
    except OSError:
        return None


def _question(peer: Address, here: Address) -> bytes:
    family = socket.AF_INET6 if ":" in peer[0] else socket.AF_INET
    ports = struct.pack("!HH", peer[1], here[1])
    addresses = b"".join(socket.inet_pton(family, host).ljust(16, b"\0") for host, _ in (peer, here))
    asked = _REQUEST.pack(family, socket.IPPROTO_TCP, 0, 0, 0xFFFFFFFF) + ports + addresses
    asked += _REST.pack(0, _NO_COOKIE, _NO_COOKIE)
    return _HEADER.pack(_HEADER.size + len(asked), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST, 0, 0) + asked


def _asked(question: bytes) -> bytes:
    """The kernel answers before `send` returns."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as kernel:
        kernel.setblocking(False)
        kernel.send(question)
        return kernel.recv(4096)


def _owner(answer: bytes) -> int | None:
    """None for a socket that is closed already: it has no inode, and its uid reads 0."""
    if len(answer) < _OWNER_AT + _OWNER.size or _HEADER.unpack_from(answer)[1] != _SOCK_DIAG_BY_FAMILY:
        return None
    uid: int
    uid, inode = _OWNER.unpack_from(answer, _OWNER_AT)
    return uid if inode else None
