"""The gateway's port for other machines in this process, in front of a scripted daemon.

The fixture at the end is imported by conftest files.
"""

from __future__ import annotations

import asyncio
import select
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from math import inf
from typing import TypeVar

import pytest
import trustme

from djinn_client.protocol import MAX_REPLY, FrameDecoder, Hello, Request, ServerMessage, decode_reply, encode
from djinn_client.transport.connection import Connection, connect
from djinn_client.transport.remote.carrier import Carrier
from djinn_client.transport.remote.link import Link
from djinn_client.transport.remote.records import VERSION, Kind
from djinn_client.transport.remote.tls import ALPN, fingerprint
from djinn_client.transport.steps import run
from djinnd.config import Remote
from djinnd.gateway.daemon.refused_tokens import RefusedTokens
from djinnd.gateway.remote.accounts import Accounts
from djinnd.gateway.remote.door import RemoteDoor
from djinnd.gateway.remote.figures import Figures
from tests.support.scripted_daemon import ScriptedDaemon

T = TypeVar("T")

PATIENCE_S = 60.0
TOKEN = "djn_" + "a" * 43
LIMITS = Remote(grace=30, window_bytes=1 << 30, window_bytes_per_token=1 << 30)


class Stranger:
    """A client that does what its test says. It reads nothing before `read`, and the network holds little for it."""

    def __init__(self, port: int) -> None:
        plain = socket.socket()
        plain.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        plain.connect(("127.0.0.1", port))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.set_alpn_protocols([ALPN])
        self._carrier = Carrier(context.wrap_socket(plain))
        self._link = Link()

    def begin(self, token: str = TOKEN) -> None:
        """Opens a link."""
        self.put(Kind.OPEN, bytes([VERSION]))
        self.say(Hello(id=1, token=token))

    def say(self, request: Request) -> None:
        self.put(Kind.FRAMES, encode(request))

    def put(self, kind: Kind, payload: bytes = b"") -> None:
        self._link.put(kind, payload)
        while self._carrier.write(self._link):
            select.select([], [self._carrier.fileno()], [], PATIENCE_S)

    def read(self, most: float = inf) -> list[ServerMessage]:
        """All messages that come until the gateway closes the link, or so many."""
        decoder, messages = FrameDecoder(MAX_REPLY), list[ServerMessage]()
        while not self._link.is_closed_by_peer and len(messages) < most:
            more, _ = self._carrier.read(self._link)
            while (arrived := self._link.collect()) is not None:
                messages += [decode_reply(frame.payload) for frame in decoder.feed(bytes(arrived.data))]
            if not more and len(messages) < most:
                assert select.select([self._carrier.fileno()], [], [], PATIENCE_S)[0], "the gateway is silent"
        return messages

    def close(self) -> None:
        self._carrier.close()


class RunningDoor:
    """Its loop runs in a thread."""

    def __init__(self, daemon: str, limits: Remote = LIMITS) -> None:
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate = authority.issue_cert("localhost")
        certificate.configure_cert(context)
        context.set_alpn_protocols([ALPN])
        pem = certificate.cert_chain_pems[0].bytes().decode()
        self._fingerprint = fingerprint(ssl.PEM_cert_to_DER_cert(pem))
        listening = socket.create_server(("127.0.0.1", 0))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        self.port = listening.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        refused = RefusedTokens()
        self.figures = Figures(refused)
        self.door = self.do(lambda: RemoteDoor(listening, context, daemon, Accounts(limits, refused, self.figures)))
        self.do(self.door.start)

    def do(self, act: Callable[[], T]) -> T:
        """Calls the function in the loop's thread, and returns its result."""
        done: Future[T] = Future()

        def call() -> None:
            try:
                done.set_result(act())
            except BaseException as error:
                done.set_exception(error)

        self._loop.call_soon_threadsafe(call)
        return done.result(PATIENCE_S)

    def drain(self, seconds: float) -> Future[None]:
        """Begins in the loop's thread: the links have been told when this returns."""
        return self.do(lambda: asyncio.run_coroutine_threadsafe(self.door.drain(seconds), self._loop))

    def client(self, token: str = TOKEN) -> Connection:
        """djinn_client's own connection, after its Hello."""
        return run(connect(f"djinns://{token}@127.0.0.1:{self.port}#{self._fingerprint}"), PATIENCE_S)

    def stranger(self) -> Stranger:
        return Stranger(self.port)

    def stop(self) -> None:
        self.do(self.door.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


@pytest.fixture
def door(daemon: ScriptedDaemon) -> Iterator[RunningDoor]:
    running = RunningDoor(daemon.address)
    yield running
    running.stop()
