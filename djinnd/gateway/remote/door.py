"""The port for sessions from other machines: accepts TLS connections, and gives each its link."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from contextlib import suppress

from djinn_client.errors import ProtocolError
from djinn_client.transport.aio_steps import run
from djinn_client.transport.remote.carrier import Carrier
from djinn_client.transport.remote.channel import prepare, shake_hands
from djinn_client.transport.remote.link import Link
from djinn_client.transport.remote.records import RESUMING, VERSION, Kind, Record
from djinn_client.transport.steps import Steps, Wait
from djinnd.config import Remote
from djinnd.gateway.remote.accounts import Accounts
from djinnd.gateway.remote.figures import NO_HELLO
from djinnd.gateway.remote.relay import STOPS, Relay

log = logging.getLogger("djinnd.gateway")

STRANGERS = 256  # connections that have not shown a token; the oldest makes room for a new one
HELLO_S = 10.0  # from a connection to its Hello
_PAUSE_S = 1.0  # when this process may open no more descriptors
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class RemoteDoor:
    """Owns the listening socket and the links. `daemon`: the path of its socket."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, daemon: str, accounts: Accounts) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._context = context
        self._daemon = daemon
        self._accounts = accounts
        self._relays: dict[bytes, Relay] = {}  # by their secret
        self._strangers: dict[asyncio.Task[None], None] = {}  # the oldest first
        self._accepting: asyncio.Task[None] | None = None
        self._drained = asyncio.Event()  # no link is left

    def start(self) -> None:
        self._accepting = asyncio.create_task(self._accept())

    def follow(self, limits: Remote) -> None:
        """Applies limits of a new configuration."""
        self._accounts.limits = limits

    async def drain(self, seconds: float) -> None:
        """Takes no more connections, lets requests finish, and ends all links."""
        self._stop_accepting()
        for relay in list(self._relays.values()):
            relay.drain()
        self._drained.clear()
        if self._relays:
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await self._drained.wait()
        self.close()

    def _stop_accepting(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        self._socket.close()
        for task in list(self._strangers):
            task.cancel()

    def close(self) -> None:
        """Ends all links at once."""
        self._stop_accepting()
        for relay in list(self._relays.values()):
            relay.end(STOPS)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._socket)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    log.error("accept_paused error=%s seconds=%g", error, _PAUSE_S)
                    await asyncio.sleep(_PAUSE_S)
                continue
            if len(self._strangers) >= STRANGERS:
                next(iter(self._strangers)).cancel()
            task = asyncio.create_task(self._greet(sock))
            self._strangers[task] = None
            task.add_done_callback(lambda task: self._strangers.pop(task, None))

    async def _greet(self, sock: socket.socket) -> None:
        """Brings a connection to its link, or closes it."""
        prepare(sock)
        secured = self._context.wrap_socket(sock, server_side=True, do_handshake_on_connect=False)
        carrier = Carrier(secured)
        relay: Relay | None = None
        is_secured = False
        try:
            async with asyncio.timeout(HELLO_S):
                await run(shake_hands(secured))
                is_secured = True
                relay = self._link_for(carrier, await run(_first_record(carrier)))
                if relay is not None:
                    await relay.settled.wait()
        except (OSError, TimeoutError, ProtocolError) as error:
            log.info("remote_refused reason=%s", error or "it was too slow")
            self._refuse(carrier, relay)
            self._count(is_secured, error.code if isinstance(error, ProtocolError) else NO_HELLO)
        except asyncio.CancelledError:
            self._refuse(carrier, relay)
            self._count(is_secured, NO_HELLO)
            raise

    def _count(self, is_secured: bool, reason: str) -> None:
        if is_secured:
            self._accounts.figures.refused_links[reason] += 1
        else:
            self._accounts.figures.failed_handshakes += 1

    def _refuse(self, carrier: Carrier, relay: Relay | None) -> None:
        if relay is not None and not relay.is_introduced:
            relay.end("no Hello came")
        elif relay is None:
            carrier.close()

    def _link_for(self, carrier: Carrier, record: Record) -> Relay | None:
        """The link that a connection begins or continues; None if it continues one that is gone. Raises
        ProtocolError."""
        if record.kind is Kind.OPEN and record.payload[:1] == bytes([VERSION]):
            if len(self._relays) >= self._accounts.limits.connections:
                raise ProtocolError(f"the gateway has {len(self._relays):,} connections, its limit")
            relay = Relay(self._daemon, self._accounts.limits.grace, self._accounts, self._ended)
            self._relays[relay.secret] = relay
            relay.open(carrier)
            return relay
        if record.kind is not Kind.RESUME or len(record.payload) != RESUMING.size:
            raise ProtocolError("a connection must begin or continue a link of this version")
        secret, received = RESUMING.unpack(record.payload)
        if (found := self._relays.get(secret)) is not None:
            found.resume(carrier, received)
            return found
        farewell = Link()
        farewell.put(Kind.GONE)
        carrier.write(farewell)
        carrier.close()
        return None

    def _ended(self, relay: Relay) -> None:
        del self._relays[relay.secret]
        if not self._relays:
            self._drained.set()


def _first_record(carrier: Carrier) -> Steps[Record]:
    """Raises OSError, ProtocolError."""
    link = Link(_no_window)
    while True:
        more, record = carrier.read(link)
        if record is not None:
            return record
        if link.received:
            raise ProtocolError("a connection must begin with OPEN or RESUME")
        if not more:
            yield Wait("read", carrier.fileno())


def _no_window(nbytes: int) -> int:
    raise ProtocolError("a window came before its link")
