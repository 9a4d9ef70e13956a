"""Hostile connections at the port for other machines: others are served, and the daemon notices none of them."""

from __future__ import annotations

import os
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress

import pytest

import djinn_client as djinn
from djinn_client.protocol import VERSION, Hello, Ping, encode
from djinn_client.transport.remote.records import COUNT, HEADER, RESUMING, Kind, Record
from djinn_client.transport.remote.records import VERSION as LINKS
from djinn_client.transport.remote.tls import ALPN
from tests.conftest import MODEL
from tests.support.daemon import Daemon, descriptors_of, holdings, wait_for
from tests.support.remote import RemoteGateway, daemon_fixture, gateway_fixture, token_of

MEMORY = 150 << 20  # bytes that the gateway may grow by
BEGIN = Record(Kind.OPEN, bytes([LINKS]))


daemon = daemon_fixture()
gateway = gateway_fixture({"grace": "2s", "window_bytes_per_token": "16MiB", "window_bytes": "64MiB"})


@pytest.fixture(scope="module")
def token(daemon: Daemon) -> str:
    return token_of(daemon, "stranger")


class Stranger:
    """A TLS connection without our client."""

    def __init__(self, gateway: RemoteGateway) -> None:
        context = ssl.create_default_context(cafile=str(gateway.authority_file))
        context.set_alpn_protocols([ALPN])
        plain = socket.create_connection(("127.0.0.1", gateway.port), 60)
        self.socket = context.wrap_socket(plain, server_hostname="localhost")

    def send(self, *records: Record) -> None:
        with suppress(OSError):  # the gateway has hung up
            self.socket.sendall(b"".join(record.header + bytes(record.payload) for record in records))

    def answer(self) -> bytes:
        """All that comes until the gateway hangs up."""
        found = b""
        with suppress(OSError):
            while data := self.socket.recv(1 << 16):
                found += data
        self.socket.close()
        return found


def hello(token: str) -> Record:
    return Record(Kind.FRAMES, encode(Hello(id=1, client="stranger", token=token)))


def no_token(stranger: Stranger, token: str) -> str:
    stranger.send(BEGIN, hello(""))
    return "needs a token"


def unknown_token(stranger: Stranger, token: str) -> str:
    stranger.send(BEGIN, hello("djn_" + "x" * 43))
    return "not_authenticated"


def other_first_frame(stranger: Stranger, token: str) -> str:
    stranger.send(BEGIN, Record(Kind.FRAMES, encode(Ping(id=1))))
    return "the first frame must be Hello"


def two_frames_at_once(stranger: Stranger, token: str) -> str:
    stranger.send(BEGIN, Record(Kind.FRAMES, encode(Hello(id=1, token=token)) + encode(Ping(id=2))))
    return "before the answer to the first one"


def wrong_version(stranger: Stranger, token: str) -> str:
    stranger.send(BEGIN, Record(Kind.FRAMES, b"DJ" + bytes([VERSION + 1]) + b"\0" * 5))
    return "version"


def other_links(stranger: Stranger, token: str) -> str:
    stranger.send(Record(Kind.OPEN, bytes([LINKS + 1])))
    return ""


def link_that_is_gone(stranger: Stranger, token: str) -> str:
    stranger.send(Record(Kind.RESUME, RESUMING.pack(os.urandom(16), 0)))
    return ""


def frames_before_a_link(stranger: Stranger, token: str) -> str:
    stranger.send(hello(token))
    return ""


def noise(stranger: Stranger, token: str) -> str:
    with suppress(OSError):
        stranger.socket.sendall(b"\xff" * 4096)
    return ""


def large_record(stranger: Stranger, token: str) -> str:
    with suppress(OSError):
        stranger.socket.sendall(BEGIN.header + BEGIN.payload + HEADER.pack(Kind.FRAMES, 1 << 31))  # type: ignore[operator]
    return "a record of 2,147,483,648 bytes"


def early_window(stranger: Stranger, token: str) -> str:
    stranger.send(BEGIN, Record(Kind.WINDOW, COUNT.pack(1 << 20)))
    return "before the daemon had welcomed"


def large_window(stranger: Stranger, token: str) -> str:
    stranger.send(BEGIN, hello(token))
    stranger.socket.recv(1 << 16)
    time.sleep(0.3)  # for the Welcome; without it the refusal is another
    stranger.send(Record(Kind.WINDOW, COUNT.pack(1 << 50)))
    return "window"


def opened_twice(stranger: Stranger, token: str) -> str:
    stranger.send(BEGIN, hello(token), BEGIN)
    return "at a wrong time"


HOSTILE: list[Callable[[Stranger, str], str]] = [
    no_token,
    unknown_token,
    other_first_frame,
    two_frames_at_once,
    wrong_version,
    other_links,
    link_that_is_gone,
    frames_before_a_link,
    noise,
    large_record,
    early_window,
    large_window,
    opened_twice,
]


@pytest.mark.smoke
@pytest.mark.parametrize("act", HOSTILE, ids=lambda act: act.__name__)
def test_a_connection_that_breaks_the_rules_is_told_why_and_ends(
    daemon: Daemon, gateway: RemoteGateway, token: str, act: Callable[[Stranger, str], str]
) -> None:
    stranger = Stranger(gateway)
    told = act(stranger, token)
    assert told.encode() in stranger.answer()
    with djinn.Client(gateway.address_for(token)) as client:
        client.ping()


def test_a_certificate_that_was_not_trusted_is_refused(gateway: RemoteGateway, token: str) -> None:
    address = gateway.address_for(token)
    with pytest.raises(djinn.CertificateNotTrusted, match="not the one that was trusted"):
        djinn.Client(address[:-4] + "0000").ping()
    with pytest.raises(djinn.CertificateNotTrusted, match="djinnctl trust"):
        djinn.Client(address.partition("#")[0]).ping()


def test_strangers_disturb_nobody(daemon: Daemon, gateway: RemoteGateway, token: str) -> None:
    """Fifty of five hundred connections are hostile: they end TLS in the middle, say nothing, or break the rules."""
    before = holdings(daemon)
    grown = _memory(gateway)
    descriptors = len(descriptors_of(gateway.process.pid))
    with ExitStack() as stack:
        slow = [socket.create_connection(("127.0.0.1", gateway.port), 60) for _ in range(25)]
        for sock in slow:
            stack.enter_context(sock)
            sock.sendall(b"\x16\x03\x01")  # the beginning of a TLS handshake
        clients = [stack.enter_context(djinn.Client(gateway.address_for(token))) for _ in range(225)]
        others = token_of(daemon, "others")
        clients += [stack.enter_context(djinn.Client(gateway.address_for(others))) for _ in range(225)]
        attack = threading.Thread(target=_attack, args=(gateway, token))
        attack.start()
        for client in clients:
            client.ping()
        with djinn.Session(MODEL, address=gateway.address_for(token)) as s:
            assert len(s.generate("def f", max_tokens=4, ignore_eos=True).token_ids) == 4
        attack.join()
        for client in clients:
            client.ping()
        assert _memory(gateway) - grown < MEMORY
    wait_for(lambda: len(descriptors_of(gateway.process.pid)) <= descriptors + 1)
    assert holdings(daemon) == before


def _attack(gateway: RemoteGateway, token: str) -> None:
    for n in range(25):
        stranger = Stranger(gateway)
        HOSTILE[n % len(HOSTILE)](stranger, token)
        stranger.answer()


def _memory(gateway: RemoteGateway) -> int:
    """Bytes of the gateway's process."""
    with open(f"/proc/{gateway.process.pid}/statm") as file:
        return int(file.read().split()[1]) * 4096
