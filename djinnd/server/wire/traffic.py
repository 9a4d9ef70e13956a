"""Bounds the memory and descriptors of one user's connections: large incoming frames, queued replies, and descriptors.

A large frame is charged to the user's ledger before it is read, by the length in its header, and stays charged until
its request has ended. If there is no room, its connection is not read. Frames wait for room in a queue, so none stops
half-way for lack of it. Replies are never held back. If a user has too many, the connection with the most is closed.
SMALL bytes in each direction are free on each connection, so frames and replies of usual size touch no ledger.
"""

from __future__ import annotations

import fcntl
import logging
import socket
import termios
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from djinn_client.errors import FrameTooLarge
from djinnd.server.quotas.ledger import CONNECTION_BYTES, DESCRIPTORS, Ledger
from djinnd.server.system.closer import CloseLane

if TYPE_CHECKING:
    from djinnd.server.wire.connection import FrameConnection

log = logging.getLogger("djinnd.server")

SMALL = 64 << 10


class Traffic:
    """The accounts of one user's connections. `lane` closes the user's descriptors."""

    def __init__(self, ledger: Ledger, lane: CloseLane) -> None:
        self._ledger = ledger
        self._lane = lane
        self._senders: set[FrameConnection] = set()  # connections with more than SMALL bytes of queued replies
        self._waiting: deque[tuple[FrameConnection, int]] = deque()  # frames that wait for room

    # --- input --------------------------------------------------------------------------------------------------------

    def take(self, holder: FrameConnection, nbytes: int) -> bool:
        """Charges a frame. Returns False if it must wait; `room_made` is called when it has been charged. Raises
        FrameTooLarge."""
        if nbytes > (limit := self._ledger.limit(CONNECTION_BYTES)):
            told = f"a frame of {nbytes:,} bytes is more than your connections may hold together, {limit:,}"
            raise FrameTooLarge(told, length=nbytes, limit=limit)
        if self._waiting or not self._ledger.has_room(CONNECTION_BYTES, nbytes):
            self._waiting.append((holder, nbytes))
            return False
        self._ledger.add(CONNECTION_BYTES, nbytes)
        return True

    def give_back(self, nbytes: int) -> None:
        self._ledger.release(CONNECTION_BYTES, nbytes)
        self._admit()

    def leave(self, holder: FrameConnection) -> None:
        """Removes a closed connection's frame from the queue."""
        if any(waiting is holder for waiting, _ in self._waiting):
            self._waiting = deque(each for each in self._waiting if each[0] is not holder)
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._ledger.has_room(CONNECTION_BYTES, self._waiting[0][1]):
            holder, nbytes = self._waiting.popleft()
            self._ledger.add(CONNECTION_BYTES, nbytes)
            holder.room_made()

    # --- output -------------------------------------------------------------------------------------------------------

    def replies(self, holder: FrameConnection, was: int, nbytes: int) -> None:
        """Changes the charge for the connection's queued replies from `was` to `nbytes`."""
        (self._senders.add if nbytes else self._senders.discard)(holder)
        if nbytes < was:
            self.give_back(was - nbytes)
        elif not self._ledger.add(CONNECTION_BYTES, nbytes - was):
            slowest = max(self._senders, key=lambda each: each.held_bytes)
            log.warning("client_too_slow held=%d used=%d", slowest.held_bytes, self._ledger.used(CONNECTION_BYTES))
            slowest.close()

    # --- descriptors --------------------------------------------------------------------------------------------------

    def came(self, descriptors: int) -> bool:
        """Charges descriptors that have come. Returns False if the user now has too many open."""
        return self._ledger.add(DESCRIPTORS, descriptors)

    def taken(self, descriptors: int) -> None:
        """Releases the charge for descriptors that have a new owner, which closes them."""
        self._ledger.release(DESCRIPTORS, descriptors)

    def drop(self, fds: Sequence[int]) -> None:
        """Closes descriptors that have come, in a thread if that may take long."""
        if fds:
            self._lane.close(fds, lambda: self._ledger.release(DESCRIPTORS))

    def discard(self, fds: Sequence[int]) -> None:
        """Closes windows that were sent, or were to be sent; in a thread, as gigabytes may be freed."""
        self._lane.close(fds)

    def hang_up(self, sock: socket.socket) -> None:
        """Closes a connection. That also closes descriptors that the client has sent and that were not received, so it
        may take long."""
        with suppress(OSError):  # the client has closed it already
            sock.shutdown(socket.SHUT_RDWR)  # nothing more can come
        if int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), "little"):
            self._lane.close([sock.detach()])
        else:
            sock.close()
