"""What the connections of one user hold of the server: large frames on their way in, replies that wait, descriptors.

A large frame is charged to the user's ledger before it is read, from its header's word, and stays charged until its
request has ended. Where there is no room, its connection is not read: frames that wait for room come in one after
another, so none stops half-way for lack of it. Replies cannot wait to be made: where they are too many, the connection
that holds the most is closed. SMALL bytes each way are free on each connection, so that frames and replies of usual
size touch no ledger.
"""

from __future__ import annotations

import fcntl
import logging
import socket
import termios
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from djinn_client.errors import FrameTooLarge
from djinnd.server.closer import Lane
from djinnd.server.ledger import CONNECTION_BYTES, DESCRIPTORS, Ledger

log = logging.getLogger("djinnd.server")

SMALL = 64 << 10


class Holder(Protocol):
    """A connection."""

    @property
    def held_bytes(self) -> int:
        """Of replies that wait."""

    def room_made(self) -> None:
        """The frame that it has waited for may come in."""

    def close(self) -> None: ...


class Traffic:
    """`lane` closes the user's descriptors."""

    def __init__(self, ledger: Ledger, lane: Lane) -> None:
        self._ledger = ledger
        self._lane = lane
        self._senders: set[Holder] = set()  # hold more than SMALL bytes of replies
        self._waiting: deque[tuple[Holder, int]] = deque()  # frames that wait for room

    # --- in ---------------------------------------------------------------------------------------------------------

    def take(self, holder: Holder, nbytes: int) -> bool:
        """Charges a frame. False: it waits, and `room_made` is called when it is charged. Raises FrameTooLarge."""
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

    def leave(self, holder: Holder) -> None:
        """The connection is closed: its frame waits no longer."""
        if any(waiting is holder for waiting, _ in self._waiting):
            self._waiting = deque(each for each in self._waiting if each[0] is not holder)
            self._admit()

    def _admit(self) -> None:
        while self._waiting and self._ledger.has_room(CONNECTION_BYTES, self._waiting[0][1]):
            holder, nbytes = self._waiting.popleft()
            self._ledger.add(CONNECTION_BYTES, nbytes)
            holder.room_made()

    # --- out --------------------------------------------------------------------------------------------------------

    def replies(self, holder: Holder, was: int, nbytes: int) -> None:
        """The replies that wait in this connection are charged with so many bytes now, and were with `was`."""
        (self._senders.add if nbytes else self._senders.discard)(holder)
        if nbytes < was:
            self.give_back(was - nbytes)
        elif not self._ledger.add(CONNECTION_BYTES, nbytes - was):
            slowest = max(self._senders, key=lambda each: each.held_bytes)
            log.warning("client_too_slow held=%d used=%d", slowest.held_bytes, self._ledger.used(CONNECTION_BYTES))
            slowest.close()

    # --- descriptors ------------------------------------------------------------------------------------------------

    def came(self, descriptors: int) -> bool:
        """Charges descriptors that have come. False: the user has more open than it may have."""
        return self._ledger.add(DESCRIPTORS, descriptors)

    def taken(self, descriptors: int) -> None:
        """They belong to somebody else now, who closes them."""
        self._ledger.release(DESCRIPTORS, descriptors)

    def drop(self, fds: Sequence[int]) -> None:
        """Closes descriptors that have come, beside the loop."""
        if fds:
            self._lane.close(fds, lambda: self._ledger.release(DESCRIPTORS))

    def discard(self, fds: Sequence[int]) -> None:
        """Closes windows that were to be sent, or were: gigabytes may be freed."""
        self._lane.close(fds)

    def hang_up(self, sock: socket.socket) -> None:
        """Closes a connection. Descriptors that a client has sent and nobody has received are closed with it, so that
        may take as long as closing them."""
        with suppress(OSError):  # the client was faster
            sock.shutdown(socket.SHUT_RDWR)  # nothing more can come
        if int.from_bytes(fcntl.ioctl(sock, termios.FIONREAD, bytes(4)), "little"):
            self._lane.close([sock.detach()])
        else:
            sock.close()
