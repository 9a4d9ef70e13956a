"""A link from another machine, and its connection to the daemon. Bytes pass in both directions without being read.

    client ◄── TLS, records ──► relay ◄── Unix socket, frames and descriptors ──► daemon

Only the first frame in each direction is read: a Hello with a token, because without one the daemon would take the
client for the gateway's own user; and the daemon's answer to it. Windows of the daemon are mapped here and sent in
parts. Windows of the client are received into memory that the daemon then gets, sealed.

    greeting ──Hello──► asking the daemon ──Welcome──► open ◄──── broken, for `grace` seconds at the most
        └─────────────────────┴──────────────────────────┴───────────┴──► leaving ──► ended

A relay that leaves has hung up on the daemon. The client still gets all that waits for it, and then the reason.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from threading import Thread
from typing import Any

from djinn_client.errors import Busy, DjinnError, NotAuthenticated, ProtocolError
from djinn_client.protocol import Failure, FrameDecoder, Hello, Welcome, decode_reply, decode_request, encode, framed
from djinn_client.transport.exchange import close_all
from djinn_client.transport.remote.carrier import Carrier
from djinn_client.transport.remote.link import Link
from djinn_client.transport.remote.records import COUNT, OPENING, Kind
from djinn_client.transport.shm import map_window, new_window
from djinnd.gateway.entry.auth import is_djinnd_token
from djinnd.gateway.remote.accounts import Accounts
from djinnd.gateway.remote.daemon_socket import DaemonSocket
from djinnd.gateway.remote.open_requests import OpenRequests
from djinnd.gateway.remote.readiness import Readiness

log = logging.getLogger("djinnd.gateway")

SECRET_BYTES = 16
MAX_HELLO = 64 << 10  # bytes of the first frame in each direction
HIGH_WATER = 1 << 20  # bytes on their way to one side, from which the other side is not read
STOPS = "the gateway stops"  # as a reason
LINGER_S = 5.0  # in which a client must take more of the last records, and then hang up
LARGE_WINDOW = 4 << 20  # bytes, for which the kernel takes a third of a millisecond; more are freed on a thread


class Relay:
    """`daemon`: the path of its socket. `on_end` is called once, when the link has ended."""

    def __init__(self, daemon: str, grace_s: float, accounts: Accounts, on_end: Callable[[Relay], None]) -> None:
        self.secret = os.urandom(SECRET_BYTES)
        self.name = ""  # of the principal, when the daemon has said it
        self.is_introduced = False  # the client's Hello has gone to the daemon
        self.settled = asyncio.Event()  # it is introduced, or has ended
        self._path = daemon
        self._grace_s = grace_s
        self._accounts = accounts
        self._figures = accounts.figures
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._ready = Readiness(self._loop)
        self._link = Link(self._make_window, is_sealed=True)
        self._carrier: Carrier | None = None
        self._daemon: DaemonSocket | None = None
        self._hello: FrameDecoder | None = FrameDecoder(MAX_HELLO, 0)
        self._welcome: FrameDecoder | None = FrameDecoder(MAX_HELLO, 0)
        self._token = ""
        self._charged = 0  # bytes of windows that the client is sending
        self._open_requests = OpenRequests()
        self._is_draining = False  # the gateway stops
        self._reason = ""  # why it leaves or has ended
        self._is_told = False  # the last record has gone out
        self._is_ended = False
        self._timer: asyncio.TimerHandle | None = None
        self._figures.links += 1

    # --- the TLS connections ------------------------------------------------------------------------------------------

    def open(self, carrier: Carrier) -> None:
        self._link.put(Kind.OPENED, OPENING.pack(self.secret, round(self._grace_s)))
        self._carry(carrier)

    def resume(self, carrier: Carrier, received: int) -> None:
        """Continues over a new TLS connection; a former one is closed. Raises ProtocolError."""
        self._link.resume(received)
        self._drop_carrier()
        self._link.put(Kind.RESUMED, COUNT.pack(self._link.received))
        log.info("remote_resumed name=%s", self.name)
        self._carry(carrier)

    def drain(self) -> None:
        """Leaves as soon as the client waits for no reply."""
        self._is_draining = True
        if self._carrier is None or self._is_told:
            self.end(STOPS)  # no client can come back
        else:
            self._leave_if_idle()

    def _leave_if_idle(self) -> None:
        if not self._open_requests and not self._charged:
            self.leave(STOPS)

    def leave(self, reason: str) -> None:
        """Hangs up on the daemon at once, and on the client when it has what waits for it."""
        if self._reason:
            return
        self._reason = reason
        self._drop_daemon()
        self._link.put(Kind.CLOSE)
        self._wait(self._grace_s)
        self._write_client()

    def end(self, reason: str) -> None:
        """Hangs up on both sides at once."""
        if self._is_ended:
            return
        self._is_ended = True
        self._figures.links -= 1
        self.settled.set()
        if not self._reason:
            self._reason = reason
            self._link.put(Kind.CLOSE)
            with suppress(OSError):
                if self._carrier is not None:
                    self._carrier.write(self._link)
        log.info("remote_ended name=%s reason=%s", self.name, self._reason)
        self._stop_timer()
        self._drop_daemon()
        self._drop_carrier()
        while (arrived := self._link.collect()) is not None:
            close_all(arrived.fds)
        if self._charged < LARGE_WINDOW:
            self._link.close_windows()
        else:
            _aside(self._link.close_windows)
        self._accounts.release(self._token, self._charged)
        if self._token:
            self._accounts.close(self._token)
        self._on_end(self)

    def _carry(self, carrier: Carrier) -> None:
        self._carrier = carrier
        self._figures.connected(carrier)
        self._stop_timer()
        if self._reason:
            self._write_client()
        else:
            self._read_client()

    def _broken(self, error: OSError) -> None:
        """The TLS connection is broken. Its client has `grace` seconds to come back, unless it has all."""
        self._drop_carrier()
        if self.is_introduced and not (self._is_told or self._is_draining or self._is_ended):
            log.info("remote_broken name=%s error=%s", self.name, error.strerror or error)
            self._wait(self._grace_s)
        else:
            self.end("the client is gone")

    def _drop_carrier(self) -> None:
        if self._carrier is not None:
            self._ready.forget(self._carrier.fileno())
            self._figures.disconnected(self._carrier)
            self._carrier.close()
            self._carrier = None

    def _drop_daemon(self) -> None:
        if self._daemon is not None:
            self._ready.forget(self._daemon.fileno())
            self._daemon.close()
            self._daemon = None

    def _wait(self, seconds: float) -> None:
        """Ends the link unless something happens before."""
        self._stop_timer()
        self._timer = self._loop.call_later(seconds, self.end, "the client did not come back")

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- from the client to the daemon --------------------------------------------------------------------------------

    def _read_client(self) -> None:
        carrier = self._carrier
        if carrier is None:
            return
        if self._reason:
            return self._skip(carrier)
        try:
            more, record = carrier.read(self._link)
            if record is not None:
                raise ProtocolError(f"a record {record.kind.name} came at a wrong time")
            while (arrived := self._link.collect()) is not None:
                self._from_client(arrived.data, arrived.fds)
        except OSError as error:
            return self._broken(error)
        except DjinnError as error:
            return self._refuse(error)
        if self._link.is_closed_by_peer:
            return self.end("the client has closed it")
        self._write_daemon()
        self._write_client()
        if more and self._carrier is carrier:
            self._loop.call_soon(self._read_client)

    def _skip(self, carrier: Carrier) -> None:
        """A relay that leaves takes nothing more."""
        try:
            carrier.skip()
        except OSError as error:
            self._broken(error)

    def _from_client(self, data: bytearray, fds: list[int]) -> None:
        """Raises DjinnError."""
        if self._hello is None:
            assert self._daemon is not None
            nbytes = sum(os.fstat(fd).st_size for fd in fds)
            self._open_requests.sent(data)
            self._daemon.put(data, fds)
            self._accounts.release(self._token, nbytes)
            self._charged -= nbytes
            return
        frames = list(self._hello.feed(bytes(data)))
        if len(frames) > 1 or (frames and self._hello.pending):
            raise ProtocolError("a second frame came before the answer to the first one")
        for frame in frames:
            self._introduce(frame.payload)

    def _introduce(self, payload: bytes) -> None:
        """Connects to the daemon with the client's Hello. Raises DjinnError."""
        hello = decode_request(payload)
        if not isinstance(hello, Hello):
            raise ProtocolError("the first frame must be Hello")
        if not is_djinnd_token(hello.token):
            raise NotAuthenticated("a connection from another machine needs a token: `djinnctl token add` makes one")
        self._accounts.open(hello.token)
        self._token = hello.token
        try:
            self._daemon = DaemonSocket(self._path)
        except OSError as error:
            raise Busy(f"the gateway cannot reach the daemon now: {error.strerror}") from error
        self._hello = None
        self.is_introduced = True
        self.settled.set()
        frame = framed(payload)
        self._open_requests.sent(frame)
        self._daemon.put(frame, [])

    def _make_window(self, nbytes: int) -> int:
        """Raises ProtocolError, QuotaExceeded, Busy."""
        if self._welcome is not None:
            raise ProtocolError("a window came before the daemon had welcomed the client")
        self._accounts.charge(self._token, nbytes)
        self._charged += nbytes
        try:
            return new_window("djinn-remote", nbytes, is_reserved=False)
        except OSError as error:
            raise Busy(f"the gateway has no memory for a window of {nbytes:,} bytes now: {error}") from error

    def _refuse(self, error: DjinnError) -> None:
        """Leaves with an error that is about the whole link."""
        self._figures.refused_links[error.code] += 1
        self._link.put_frames(encode(Failure(id=0, code=error.code, message=error.message, data=error.data)))
        self.leave(error.message)

    def _write_daemon(self) -> None:
        if self._daemon is None:
            return
        try:
            more = self._daemon.write()
        except OSError:
            more = False  # its last words are read before its end is noticed
        self._ready.writing(self._daemon.fileno(), self._write_daemon, more)
        self._watch()

    # --- from the daemon to the client --------------------------------------------------------------------------------

    def _read_daemon(self) -> None:
        assert self._daemon is not None
        try:
            data, fds = self._daemon.read()
        except BlockingIOError:
            return
        except OSError:
            data, fds = b"", []
        if not data:
            return self.leave("the daemon has closed it")
        try:
            if self._welcome is not None:
                self._look_for_welcome(data)
            for fd in fds:
                self._link.put_window(self._mapped(fd))
        except DjinnError as error:
            return self._refuse(error)
        finally:
            close_all(fds)
        self._open_requests.answered(data)
        self._link.put_frames(data)
        self._write_client()

    def _mapped(self, fd: int) -> memoryview:
        """A window of the daemon. Raises ProtocolError, OutOfMemory."""
        nbytes = os.fstat(fd).st_size
        return map_window(fd, nbytes, _aside if nbytes >= LARGE_WINDOW else None)

    def _look_for_welcome(self, data: bytes) -> None:
        assert self._welcome is not None
        for frame in self._welcome.feed(data):
            reply = decode_reply(frame.payload)
            if isinstance(reply, Failure):
                self._figures.refused_links[reply.code] += 1
                if reply.code == NotAuthenticated.code:
                    self._accounts.refused(self._token)
            if isinstance(reply, Welcome):
                self.name = reply.name
                log.info("remote_connected name=%s", self.name)
                self._welcome = None
            return

    def _write_client(self) -> None:
        if self._is_draining:
            self._leave_if_idle()
        if self._carrier is None:
            return self._watch()
        try:
            more = self._carrier.write(self._link)
            if self._reason and not more:
                self._carrier.finish()
                self._is_told = True
        except OSError as error:
            return self._broken(error)
        if self._is_told and self._is_draining:
            return self.end(STOPS)
        if self._reason:
            self._wait(LINGER_S)
        self._ready.writing(self._carrier.fileno(), self._write_client, more)
        self._watch()

    # --- the loop -----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Reads each side unless too much waits for the other one."""
        if self._carrier is not None:
            has_room = self._daemon is None or self._daemon.queued < HIGH_WATER
            self._ready.reading(self._carrier.fileno(), self._read_client, has_room)
        if self._daemon is not None:
            self._ready.reading(self._daemon.fileno(), self._read_daemon, self._link.held < HIGH_WATER)


def _aside(act: Callable[..., Any], *args: Any) -> None:
    """Calls the function on a thread of its own."""
    Thread(target=act, args=args, name="djinn-free", daemon=True).start()
