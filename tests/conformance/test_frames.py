"""Clients that break the protocol get the reason, lose at most their connection, and disturb no other client."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

import djinn_client as djinn
from djinn_client.protocol import (
    HEADER,
    MAGIC,
    MAX_FDS,
    MAX_REPLY,
    MAX_REQUEST,
    VERSION,
    Cancel,
    Done,
    Failure,
    FrameDecoder,
    Hello,
    Ping,
    ServerMessage,
    Welcome,
    decode_reply,
    encode,
)
from tests.support.daemon import Daemon

PATIENCE_S = 60


class Raw:
    """A connection without our client."""

    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(address)
        self._decoder = FrameDecoder(MAX_REPLY)
        self._messages: list[ServerMessage] = []

    def send(self, data: bytes) -> None:
        self.socket.sendall(data)

    def receive(self) -> ServerMessage | None:
        """The next message, or None at the end."""
        while not self._messages:
            try:
                data = self.socket.recv(1 << 16)
            except ConnectionResetError:  # it was closed with bytes of ours unread
                data = b""
            if not data:
                return None
            self._messages += [decode_reply(frame.payload) for frame in self._decoder.feed(data)]
        return self._messages.pop(0)

    def introduce(self) -> None:
        self.send(encode(Hello(id=1)))
        assert isinstance(self.receive(), Welcome)

    def expect_refusal(self, code: str) -> None:
        """A last word of the connection's, and the end."""
        message = self.receive()
        assert isinstance(message, Failure)
        assert (message.id, message.code) == (0, code)
        assert message.message
        assert self.receive() is None


@pytest.fixture(scope="session")
def daemon_address(daemon: Daemon) -> str:
    """Over TLS these bytes are inside of records."""
    return daemon.address


@pytest.fixture
def raw(daemon_address: str) -> Iterator[Raw]:
    connection = Raw(daemon_address)
    yield connection
    connection.socket.close()
    assert djinn.status(address=daemon_address).state == "ready"  # the daemon goes on


@pytest.mark.parametrize("introduced", [False, True], ids=["at once", "after Hello"])
@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", "protocol_error"),
        (bytes(range(256)) * 16, "protocol_error"),
        (HEADER.pack(MAGIC, VERSION + 1, 0, 10) + bytes(10), "version_mismatch"),
        (HEADER.pack(MAGIC, VERSION, 0, MAX_REQUEST + 1), "frame_too_large"),
        (HEADER.pack(MAGIC, VERSION, 0, (1 << 32) - 1), "frame_too_large"),
        (HEADER.pack(MAGIC, VERSION, MAX_FDS + 1, 0), "protocol_error"),
        (HEADER.pack(MAGIC, VERSION, 0, 4) + b"\xc1\xc1\xc1\xc1", "protocol_error"),
        (HEADER.pack(MAGIC, VERSION, 0, 0), "protocol_error"),
    ],
    ids=["http", "bytes", "version", "over the limit", "far over", "descriptors", "no msgpack", "empty"],
)
def test_bytes_that_are_no_message_are_refused(raw: Raw, data: bytes, code: str, introduced: bool) -> None:
    if introduced:
        raw.introduce()
    raw.send(data)
    raw.expect_refusal(code)


def test_a_request_before_hello(raw: Raw) -> None:
    raw.send(encode(Ping(id=1)))
    raw.expect_refusal("protocol_error")


@pytest.mark.parametrize("missing", [1, 5, 20])
def test_a_frame_that_ends_early(raw: Raw, missing: int) -> None:
    raw.introduce()
    raw.send(encode(Ping(id=2))[:-missing])
    raw.socket.shutdown(socket.SHUT_WR)
    assert raw.receive() is None


def test_hanging_up_in_the_middle_of_a_frame(raw: Raw) -> None:
    raw.introduce()
    raw.send(encode(Ping(id=2))[:-3])


def test_an_unknown_message_with_an_id_is_answered_and_the_connection_goes_on(raw: Raw) -> None:
    import msgspec

    raw.introduce()
    payload = msgspec.msgpack.encode({"type": "from_the_future", "id": 7})
    raw.send(HEADER.pack(MAGIC, VERSION, 0, len(payload)) + payload)
    message = raw.receive()
    assert isinstance(message, Failure)
    assert message.id == 7
    raw.send(encode(Ping(id=8)))
    assert raw.receive() == Done(id=8)


def test_cancelling_what_does_not_run_is_nothing(raw: Raw) -> None:
    raw.introduce()
    raw.send(encode(Cancel(target=12345)) + encode(Ping(id=2)))
    assert raw.receive() == Done(id=2)


def test_many_requests_in_one_write_each_have_one_reply(raw: Raw) -> None:
    raw.introduce()
    numbers = range(10, 26)
    raw.send(b"".join(encode(Ping(id=number)) for number in numbers))
    assert sorted(message.id for _ in numbers if (message := raw.receive()) is not None) == list(numbers)


def test_a_request_byte_by_byte(raw: Raw) -> None:
    raw.introduce()
    for byte in encode(Ping(id=2)):
        raw.send(bytes([byte]))
    assert raw.receive() == Done(id=2)


def test_descriptors_that_nobody_asked_for(raw: Raw, daemon_address: str) -> None:
    """They do not stay open in the daemon, and the frame counts as it would without them."""
    import os

    raw.introduce()
    read, write = os.pipe()
    socket.send_fds(raw.socket, [encode(Ping(id=2))], [write])
    os.close(write)
    assert raw.receive() is not None
    assert os.read(read, 1) == b""  # the daemon has no copy of the other end
    os.close(read)
