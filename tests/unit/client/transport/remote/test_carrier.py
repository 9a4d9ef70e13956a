"""Records over a TLS connection between two sockets of this process."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator

import pytest
import trustme

from djinn_client.errors import ProtocolError
from djinn_client.transport.remote.carrier import AT_ONCE, Carrier
from djinn_client.transport.remote.link import Link
from djinn_client.transport.remote.records import COUNT, HEADER, MAX_PAYLOAD, Kind
from djinn_client.transport.shm import map_window


class Ends:
    """Two carriers, and a link at each."""

    def __init__(self) -> None:
        authority = trustme.CA()
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("localhost").configure_cert(server)
        client = ssl.create_default_context()
        authority.configure_trust(client)
        plain = socket.socketpair()
        for sock in plain:
            sock.setblocking(False)
        self.sockets = (
            client.wrap_socket(plain[0], server_hostname="localhost", do_handshake_on_connect=False),
            server.wrap_socket(plain[1], server_side=True, do_handshake_on_connect=False),
        )
        waiting = list(self.sockets)
        while waiting:
            waiting = [sock for sock in waiting if not self._shaken(sock)]
        self.here, self.there = map(Carrier, self.sockets)
        self.link, self.other = Link(), Link()

    @staticmethod
    def _shaken(sock: ssl.SSLSocket) -> bool:
        try:
            sock.do_handshake()
            return True
        except ssl.SSLWantReadError:
            return False

    def carry(self) -> None:
        """Carries all that either end has to send."""
        while any((self.here.write(self.link), self.there.write(self.other), *self._read())):
            pass

    def _read(self) -> tuple[bool, bool]:
        return self.there.read(self.other)[0], self.here.read(self.link)[0]


@pytest.fixture
def ends() -> Iterator[Ends]:
    made = Ends()
    yield made
    made.here.close()
    made.there.close()
    made.link.close_windows()
    made.other.close_windows()


def test_frames_and_windows_go_both_ways(ends: Ends) -> None:
    large = os.urandom(5 * MAX_PAYLOAD + 7)
    ends.link.put_window(memoryview(large))
    ends.link.put_frames(large)
    ends.other.put_frames(b"back")
    ends.carry()
    there, back = ends.other.collect(), ends.link.collect()
    assert there is not None and back is not None
    assert (bytes(there.data), bytes(back.data)) == (large, b"back")
    assert bytes(map_window(there.fds[0], len(large))) == large
    os.close(there.fds[0])


def test_a_large_window_leaves_other_links_their_turns(ends: Ends) -> None:
    large, beside, turns = bytes(16 * AT_ONCE), Ends(), 0
    ends.link.put_window(memoryview(large))
    ends.link.put_frames(b"all")
    while (arrived := ends.other.collect()) is None:
        ends.here.write(ends.link)
        ends.there.read(ends.other)
        beside.link.put_frames(b"token")
        beside.carry()
        token = beside.other.collect()
        assert token is not None and token.data == b"token"
        turns += 1
    assert turns >= len(large) // (AT_ONCE + MAX_PAYLOAD)
    os.close(arrived.fds[0])
    beside.here.close()
    beside.there.close()


def test_parts_of_all_sizes_fill_a_window(ends: Ends) -> None:
    parts = [os.urandom(size) for size in (1, 3 * MAX_PAYLOAD // 4, 5, MAX_PAYLOAD, 100)]
    ends.link.put(Kind.WINDOW, COUNT.pack(sum(map(len, parts))))
    for part in parts:
        ends.link.put(Kind.PART, part)
    ends.link.put_frames(b"all")
    ends.carry()
    arrived = ends.other.collect()
    assert arrived is not None and arrived.data == b"all"
    with open(arrived.fds[0], "rb") as window:
        assert window.read() == b"".join(parts)


def test_records_before_the_end_are_read(ends: Ends) -> None:
    ends.link.put_frames(b"last")
    ends.link.put(Kind.CLOSE)
    ends.here.write(ends.link)
    ends.here.close()
    assert ends.there.read(ends.other) == (True, None)
    with pytest.raises(OSError, match="closed the TLS connection"):
        ends.there.read(ends.other)
    arrived = ends.other.collect()
    assert arrived is not None and bytes(arrived.data) == b"last"
    assert ends.other.is_closed_by_peer


def test_a_record_about_the_connection_is_returned(ends: Ends) -> None:
    ends.link.put(Kind.OPEN, b"\1")
    ends.link.put_frames(b"after")
    ends.here.write(ends.link)
    more, record = ends.there.read(ends.other)
    assert more and record is not None and (record.kind, record.payload) == (Kind.OPEN, b"\1")
    assert ends.other.collect() is None, "reading stops behind it"
    ends.carry()
    assert ends.other.collect() is not None


@pytest.mark.parametrize("header", [HEADER.pack(99, 1), HEADER.pack(Kind.FRAMES, MAX_PAYLOAD + 1)])
def test_unknown_and_oversized_records_are_refused(ends: Ends, header: bytes) -> None:
    ends.sockets[0].send(header)
    with pytest.raises(ProtocolError):
        ends.there.read(ends.other)
