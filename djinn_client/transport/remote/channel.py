"""The client's end of a link, in steps: it connects, and connects again when a TLS connection breaks."""

from __future__ import annotations

import errno
import os
import socket
import ssl
import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from mmap import PROT_READ, mmap
from threading import Thread
from typing import Any

from djinn_client.errors import CertificateNotTrusted, ConnectionLost, DjinnError, ProtocolError
from djinn_client.transport.remote.carrier import Carrier
from djinn_client.transport.remote.hosts import RemoteAddress
from djinn_client.transport.remote.link import Link
from djinn_client.transport.remote.records import COUNT, OPENING, RESUMING, VERSION, Kind, Record
from djinn_client.transport.remote.tls import client_context, expect_pinned, not_certified
from djinn_client.transport.steps import Steps, Wait
from djinn_client.transport.transfer import OnMoved

CONNECT_S = 10.0  # the longest that one attempt takes, TLS included
ATTEMPTS = 4  # that fit in the time that the gateway keeps a broken link, even if none is answered
PING_S = 10.0  # without a byte from the gateway, while a call waits
DEAD_S = 20.0  # without a byte from the gateway, after which the TLS connection counts as broken
FIRST_PAUSE_S = 0.05  # before the second attempt to connect again; each pause is twice the one before
LONGEST_PAUSE_S = 2.0
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 30), (socket.TCP_KEEPINTVL, 10), (socket.TCP_KEEPCNT, 3))


class RemoteChannel:
    """A link to a daemon of another machine. Frames go in and out, with their windows; a broken TLS connection is
    replaced while a call waits, for as long as the gateway keeps the link."""

    passes_files = False

    def __init__(self, address: RemoteAddress) -> None:
        self._address = address
        self._link = Link()
        self._carrier: Carrier | None = None
        self._secret = b""  # "" until the gateway has opened the link
        self._grace = CONNECT_S
        self._is_closed = False
        self._on_moved: OnMoved | None = None
        self._heard = 0.0  # when the last byte came, or the last call began; by time.monotonic

    def __str__(self) -> str:
        return str(self._address)

    @property
    def closed(self) -> bool:
        return self._is_closed

    def open(self) -> Steps[None]:
        """Raises OSError, CertificateNotTrusted."""
        self._carrier = Carrier((yield from _connect(self._address, CONNECT_S)))
        self._heard = time.monotonic()
        self._link.put(Kind.OPEN, bytes([VERSION]))

    def watch(self, on_moved: OnMoved | None) -> None:
        """See Channel. It is called after each mebibyte, or more often."""
        self._on_moved = on_moved
        self._link.sending.begin()
        self._link.receiving.begin()

    def send(self, frame: bytes, fds: Sequence[int]) -> Steps[None]:
        """Sends a frame and its windows. Raises ConnectionLost, but not if the gateway has closed the link: its reason
        is waiting to be read."""
        self._heard = time.monotonic()  # between calls the gateway has nothing to say
        for fd in fds:
            nbytes = os.fstat(fd).st_size
            self._link.put_window(memoryview(mmap(fd, nbytes, prot=PROT_READ)))
        self._link.put_frames(frame)
        while not self._link.is_closed_by_peer:
            try:
                if not self._open_carrier().write(self._link):
                    return
                self._read()  # acknowledgements: they free what was sent
            except OSError as error:
                yield from self._resume(error)
                continue
            self._tell_moved()
            yield Wait("write", self._open_carrier().fileno(), DEAD_S)

    def offer(self, frame: bytes) -> bool:
        """Sends a frame without waiting. Returns False if it cannot be sent now: the connection is broken, or a window
        is on its way."""
        if self._link.has_unsent_windows:
            return False
        self._link.put_frames(frame)
        try:
            return not self._open_carrier().write(self._link)
        except OSError:
            return False

    def receive(self) -> Steps[tuple[bytes, list[int]]]:
        """Waits for bytes of frames; with them come the descriptors of windows that came before. b"" at the link's end.
        Raises ConnectionLost, ProtocolError, OutOfMemory."""
        while True:
            self._tell_moved()
            if (arrived := self._link.collect()) is not None:
                return bytes(arrived.data), arrived.fds
            if self._link.is_closed_by_peer:
                return b"", []
            try:
                if self._read():
                    continue
                self._open_carrier().write(self._link)
                self._expect_alive()
            except OSError as error:
                yield from self._resume(error)
                continue
            yield Wait("read", self._open_carrier().fileno(), PING_S)

    def has_input(self) -> bool:
        """Looks without waiting whether the gateway has sent anything, or is gone."""
        with suppress(OSError, DjinnError):  # if it is broken, the next call connects again
            self._read()
        return self._link.has_arrived or self._link.is_closed_by_peer

    def close(self, *, silently: bool = False) -> None:
        """Ends the link. `silently`: the gateway is not told, because another process uses the same connection."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._carrier is not None:
            if not silently:
                self._link.put(Kind.CLOSE)
                with suppress(OSError):
                    self._carrier.write(self._link)
            self._carrier.close()
        while (arrived := self._link.collect()) is not None:
            for fd in arrived.fds:
                os.close(fd)
        self._link.close_windows()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _open_carrier(self) -> Carrier:
        """Raises OSError if the last TLS connection has broken."""
        if self._carrier is None or not self._carrier.is_open:
            raise ConnectionResetError("there is no TLS connection")
        return self._carrier

    def _read(self) -> bool:
        """Returns True if anything came. Raises OSError, ProtocolError."""
        carrier = self._open_carrier()
        before = carrier.taken
        more = True
        while more and carrier.taken - before < (1 << 20):
            more, record = carrier.read(self._link)
            if record is not None:
                self._opened(record)
        if carrier.taken == before:
            return False
        self._heard = time.monotonic()
        return True

    def _tell_moved(self) -> None:
        if self._on_moved is not None:
            self._link.sending.tell("sending", self._on_moved)
            self._link.receiving.tell("receiving", self._on_moved)

    def _opened(self, record: Record) -> None:
        if record.kind is not Kind.OPENED or len(record.payload) != OPENING.size:
            raise ProtocolError(f"{self._address} sent a record {record.kind.name} at a wrong time")
        self._secret, self._grace = OPENING.unpack(record.payload)

    def _expect_alive(self) -> None:
        """Asks a gateway that is silent for a sign of life. Raises TimeoutError if it gives none."""
        silence = time.monotonic() - self._heard
        if silence > DEAD_S:
            raise TimeoutError(f"nothing has come for {silence:.0f} s")
        if silence > PING_S:
            self._link.put(Kind.PING)
            self._open_carrier().write(self._link)

    def _resume(self, broken: OSError) -> Steps[None]:
        """Continues the link over a new TLS connection, unless the gateway has closed it. Raises ConnectionLost when
        the gateway does not answer for as long as it keeps the link, or has not kept it."""
        if self._is_closed:
            raise ConnectionLost(f"the connection to {self._address} was closed here") from broken
        if self._carrier is not None:
            with suppress(OSError):
                while self._read():  # the last words of a gateway that stops
                    pass
            self._carrier.close()
        if self._link.is_closed_by_peer:
            return
        until, pause = time.monotonic() + self._grace, 0.0
        while True:
            if pause:
                yield Wait("pause", seconds=pause)
            try:
                self._carrier = yield from (self._continued() if self._secret else self._begun_again())
                self._heard = time.monotonic()
                return
            except CertificateNotTrusted:
                raise
            except OSError as error:
                broken = error
            pause = min(max(2 * pause, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            if time.monotonic() + pause > until:
                told = f"the connection to {self._address} broke and could not be made again in {self._grace:g} s"
                raise ConnectionLost(f"{told}: {_told(broken)}") from broken

    def _begun_again(self) -> Steps[Carrier]:
        """Opens the link anew if the gateway has not answered yet. Only the Hello was sent, so it is sent again.
        Raises OSError, CertificateNotTrusted."""
        carrier = Carrier((yield from _connect(self._address, CONNECT_S)))
        self._link.resume(0)
        self._link.put(Kind.OPEN, bytes([VERSION]))
        return carrier

    def _continued(self) -> Steps[Carrier]:
        """Raises OSError, CertificateNotTrusted, ConnectionLost."""
        seconds = min(CONNECT_S, self._grace / ATTEMPTS)
        until = time.monotonic() + seconds
        carrier = Carrier((yield from _connect(self._address, seconds)))
        try:
            asking = Link()
            asking.put(Kind.RESUME, RESUMING.pack(self._secret, self._link.received))
            while carrier.write(asking):
                yield Wait("write", carrier.fileno(), seconds)
            while (record := carrier.read(asking)[1]) is None:
                if time.monotonic() > until:
                    raise TimeoutError(f"no answer came within {seconds:g} s")
                yield Wait("read", carrier.fileno(), seconds)
        except BaseException:
            carrier.close()
            raise
        if record.kind is Kind.RESUMED and len(record.payload) == COUNT.size:
            self._link.resume(COUNT.unpack(record.payload)[0])
            return carrier
        carrier.close()
        raise ConnectionLost(
            f"the connection to {self._address} broke, and the gateway has not kept it: it has restarted, or more than "
            f"{self._grace:g} s have passed"
        )


def reach(address: RemoteAddress) -> Steps[RemoteChannel]:
    """A channel to the gateway at the address. Raises ConnectionLost, CertificateNotTrusted."""
    channel = RemoteChannel(address)
    try:
        yield from channel.open()
    except OSError as error:
        raise ConnectionLost(
            f"no gateway answers at {address} ({_told(error)}): is remote.listen set in its configuration, and does a "
            "firewall let the port through?"
        ) from error
    return channel


def _connect(address: RemoteAddress, seconds: float) -> Steps[ssl.SSLSocket]:
    """A TLS connection. Each of TCP and TLS may take so long. Raises OSError, CertificateNotTrusted."""
    failure = OSError(errno.EHOSTUNREACH, os.strerror(errno.EHOSTUNREACH))
    for family, target in (yield from _resolved(address)):
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            yield from _reach(sock, target, seconds)
            return (yield from _secure(sock, address, seconds))
        except OSError as error:
            sock.close()
            failure = error
        except BaseException:
            sock.close()
            raise
    raise failure


def _resolved(address: RemoteAddress) -> Steps[list[tuple[int, Any]]]:
    """The host's addresses. A name is looked up in a thread, because the system's resolver cannot be asked without
    waiting."""
    with suppress(socket.gaierror):
        return _lookup(address, socket.AI_NUMERICHOST)
    found: Future[list[tuple[int, Any]]] = Future()

    def look_up() -> None:
        try:
            found.set_result(_lookup(address, 0))
        except OSError as error:
            found.set_exception(error)

    Thread(target=look_up, name="djinn-resolver", daemon=True).start()
    while not found.done():
        yield Wait("pause")
    return found.result()


def _lookup(address: RemoteAddress, flags: int) -> list[tuple[int, Any]]:
    found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=flags)
    return [(family, target) for family, _, _, _, target in found]


def prepare(sock: socket.socket) -> None:
    """Small records leave at once, and the kernel notices that the other machine is gone."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        sock.setsockopt(socket.IPPROTO_TCP, option, value)


def _reach(sock: socket.socket, target: Any, seconds: float) -> Steps[None]:
    prepare(sock)
    status = sock.connect_ex(target)
    if status == errno.EINPROGRESS:
        yield Wait("write", sock.fileno(), seconds)
        status = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if status == 0 and not _is_connected(sock):
            raise TimeoutError(f"no connection came about within {seconds:g} s")
    if status:
        raise OSError(status, os.strerror(status))


def _is_connected(sock: socket.socket) -> bool:
    try:
        sock.getpeername()
        return True
    except OSError:
        return False


def _secure(sock: socket.socket, address: RemoteAddress, seconds: float) -> Steps[ssl.SSLSocket]:
    context = client_context(bool(address.fingerprint), address.ca)
    secured = context.wrap_socket(sock, server_hostname=address.host, do_handshake_on_connect=False)
    try:
        yield from shake_hands(secured, seconds)
        expect_pinned(secured, address)
    except ssl.SSLCertVerificationError as error:
        secured.close()
        raise not_certified(address, error) from error
    except BaseException:
        secured.close()
        raise
    return secured


def shake_hands(sock: ssl.SSLSocket, seconds: float = CONNECT_S) -> Steps[None]:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            return sock.do_handshake()
        except ssl.SSLWantReadError:
            yield Wait("read", sock.fileno(), seconds)
        except ssl.SSLWantWriteError:
            yield Wait("write", sock.fileno(), seconds)
    raise TimeoutError(f"TLS was not ready within {seconds:g} s")


def _told(error: OSError) -> str:
    return error.strerror or str(error)
