"""One TLS connection of a link: reads and writes its records without waiting."""

from __future__ import annotations

import socket
import ssl
from contextlib import suppress

from djinn_client.errors import ProtocolError
from djinn_client.transport.remote.link import Link
from djinn_client.transport.remote.records import HEADER, MAX_PAYLOAD, Kind, Record

AT_ONCE = 256 << 10  # bytes that one call reads or writes, about a third of a millisecond of encryption
_TOGETHER = 16 << 10  # bytes of small records that leave in one TLS record, the most that TLS puts into one


class Carrier:
    """A TLS socket after its handshake. Its methods raise OSError (ssl.SSLError is one) when the connection is broken.
    TLS decrypts more bytes than one call reads, and the socket does not show them: `read` until it returns False."""

    def __init__(self, sock: ssl.SSLSocket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._head = bytearray(HEADER.size)
        self._kind: Kind | None = None  # of the record that is being read, once its header has come
        self._target = memoryview(self._head)  # the memory that is being filled, and its bytes that are there
        self._have = 0
        self._payload = bytearray()  # of the record that is being read; parts of a window share it
        self._rest = memoryview(b"")  # of the records that are being sent
        self.taken = 0  # bytes that have come
        self.given = 0  # bytes that have gone

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def is_open(self) -> bool:
        return self._socket.fileno() >= 0

    def close(self) -> None:
        """Closes the socket. Nothing is sent: a process that was forked from its owner may have the socket, too."""
        self._target = self._rest = memoryview(b"")
        self._socket.close()

    def write(self, link: Link) -> bool:
        """Sends records of the link. Returns True if more are to be sent: at once if the socket can be written."""
        sent = 0
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError):
            while sent < AT_ONCE and (self._rest or self._fill(link)):
                count = self._socket.send(self._rest)
                self._rest = self._rest[count:]
                sent += count
                self.given += count
        return bool(self._rest) or link.has_output

    def read(self, link: Link) -> tuple[bool, Record | None]:
        """Reads records into the link, up to AT_ONCE bytes. Returns whether more may be there, and a record that is
        about the TLS connection: it ends the reading. Raises also ProtocolError, and what the link raises. The end of
        the connection is raised by the call after the one that has read the last records."""
        got = 0
        while got < AT_ONCE:
            try:
                count = self._socket.recv_into(self._target[self._have :])
                if not count:
                    raise ConnectionResetError("the other end has closed the TLS connection")
            except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
                return False, None
            except OSError:
                if got:
                    return True, None
                raise
            got += count
            self.taken += count
            self._have += count
            if self._have == len(self._target) and (record := self._complete(link)) is not None:
                return True, record
        return True, None

    def finish(self) -> None:
        """Tells the other end that no more comes. Its bytes can only be skipped from now on."""
        self._socket.shutdown(socket.SHUT_WR)

    def skip(self) -> None:
        """Throws away bytes that have come. A socket that is closed with unread bytes takes back what it has sent."""
        with suppress(ssl.SSLWantReadError, ssl.SSLWantWriteError, BlockingIOError):
            if not self._socket.recv(AT_ONCE):
                raise ConnectionResetError("the other end has closed the TLS connection")

    def _fill(self, link: Link) -> bool:
        """Takes the next records to send. Returns False if there are none."""
        together = bytearray()
        while len(together) < _TOGETHER and (record := link.next()) is not None:
            together += record.header
            together += record.payload
        self._rest = memoryview(together)
        return bool(together)

    def _complete(self, link: Link) -> Record | None:
        if self._kind is None:
            self._begin(*HEADER.unpack(self._head))
            if self._have < len(self._target):
                return None
        assert self._kind is not None
        kind, self._kind = self._kind, None
        payload = self._target if kind is Kind.PART else bytes(self._target)
        self._target, self._have = memoryview(self._head), 0
        return link.take(kind, payload)

    def _begin(self, number: int, length: int) -> None:
        try:
            self._kind = Kind(number)
        except ValueError:
            raise ProtocolError(f"a record of the unknown kind {number}") from None
        if length > MAX_PAYLOAD:
            raise ProtocolError(f"a record of {length:,} bytes; at most {MAX_PAYLOAD:,}")
        if self._kind is not Kind.PART or len(self._payload) < length:
            self._payload = bytearray(length)
        self._target, self._have = memoryview(self._payload)[:length], 0
