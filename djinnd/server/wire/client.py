"""One connected client: its identity, and its requests under way.

    connected ──Hello──► introduced ──requests──► …
        └── anything else, or nothing for limits.handshake ──► a Failure, and the connection is closed

Each request gets exactly one final reply.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import TYPE_CHECKING

from djinn_client.errors import (
    DjinnError,
    InvalidRequest,
    NotAuthenticated,
    ProtocolError,
    QuotaExceeded,
    Retry,
)
from djinn_client.protocol import (
    CLASSES,
    Cancel,
    Class,
    ClientMessage,
    CloseSession,
    Failure,
    GetQuotas,
    GetStatus,
    Hello,
    Ping,
    Reply,
    Request,
    Signal,
    Welcome,
    decode_request,
    encode,
    request_id_of,
)
from djinnd import __version__
from djinnd.server.principals.tokens import Bearer
from djinnd.server.quotas.ledger import REQUESTS
from djinnd.server.system.peers import Peer
from djinnd.server.wire.call import CallRun, ClientCall, FinalReply
from djinnd.server.wire.connection import FrameConnection
from djinnd.server.wire.traffic import SMALL

if TYPE_CHECKING:
    from djinnd.server.wire.clients import ClientTable

log = logging.getLogger("djinnd.server")

_LAST_WORD = 0.5  # seconds for a client to read that its token is no longer valid

# Users see and free their resources by these requests and by Cancel.
_ALWAYS_ADMITTED = frozenset({Ping, GetStatus, GetQuotas, CloseSession})


class ConnectedClient:
    """One connection with its user and its requests under way."""

    def __init__(self, sock: socket.socket, services: ClientTable) -> None:
        self.peer = Peer.of(sock)
        self.bearer: Bearer | None = None  # set if it has shown a token
        self._services = services
        self._count_for(self.peer.user)
        self.calls: dict[int, ClientCall] = {}
        self._introduced = False
        self._leaving = False  # its further messages are ignored
        self._held_fds = 0  # descriptors of replies that wait for the journal
        self._ordinary = 0  # number of ordinary calls: see ClientCall
        limits = services.limits
        self._connection = FrameConnection(sock, self, SMALL, limits.output_bytes, True, self.traffic, limits.frame)
        loop = asyncio.get_running_loop()
        self._handshake = loop.call_later(limits.handshake, self._too_late)

    @property
    def is_admin(self) -> bool:
        return self._services.is_admin(self.user)

    @property
    def name(self) -> str:
        """Name of the connection's principal."""
        return self._services.name_of(self.user)

    def class_for(self, asked: Class | None) -> Class:
        """The class of a new session. None stands for the highest class that principal and token allow. Raises
        QuotaExceeded if the token does not allow the class; the tenant checks what the principal may have."""
        if asked is None:
            highest = self.tenant.quota.highest_class
            of_token = highest if self.bearer is None else self.bearer.highest_class or highest
            return max(highest, of_token, key=CLASSES.index)
        self.expect_class(asked)
        return asked

    def expect_class(self, priority: Class) -> None:
        """Checks that the connection's token allows this class. Raises QuotaExceeded."""
        if self.bearer is None or (highest := self.bearer.highest_class) is None:
            return
        if CLASSES.index(priority) < CLASSES.index(highest):
            may = " or ".join(CLASSES[CLASSES.index(highest) :])
            told = f"the token {self.bearer.token} is for {may}, and {priority} is above that"
            raise QuotaExceeded(told, quota="highest_class", rule="", limit=highest, used=priority)

    @property
    def unfinished(self) -> int:
        """Number of requests of all clients under way."""
        return self._services.unfinished

    @property
    def fd(self) -> int:
        return self._connection.fd

    @property
    def queued_fds(self) -> int:
        return self._held_fds + self._connection.queued_fds

    def send(self, message: Reply) -> None:
        frame = encode(message)
        self._services.after(self._connection.send, frame)

    def flush(self) -> None:
        """Sends queued replies now instead of at the end of this turn of the loop, except replies that wait for the
        journal."""
        self._connection.flush()

    def cancel_calls(self, fate: DjinnError | None = None) -> None:
        """Cancels all calls. `fate` is the error that the client gets for calls without a result."""
        for call in self.calls.values():
            call.fate = fate or call.fate
            call.cancel()

    def dismiss(self, error: NotAuthenticated) -> None:
        """Disconnects a client after its token has become invalid. The client gets _LAST_WORD seconds to read the
        error."""
        if self._leaving:
            return
        self._fail(0, error)
        self.cancel_calls(error)
        self._leave()
        asyncio.get_running_loop().call_later(_LAST_WORD, self._connection.close)

    def close(self, at_once: bool) -> None:
        """Closes the connection: at once, or after all replies have been sent."""
        if at_once:
            self._connection.close()
        else:
            self._leave()

    # --- events of the connection -------------------------------------------------------------------------------------

    def frame(self, payload: bytes, fds: list[int]) -> bool:
        """Handles a message. Postpones a request while the client does not read the replies to earlier ones."""
        traffic = self.traffic  # the descriptors were charged to this one; Hello may replace it
        if self._leaving:
            traffic.drop(fds)
            return True
        try:
            message = decode_request(payload)
        except ProtocolError as error:
            traffic.drop(fds)
            self._not_understood(payload, error)
            return True
        if self._connection.congested and isinstance(message, Request):
            return False
        if not self._take(message, fds):
            traffic.drop(fds)
        return True

    def _take(self, message: ClientMessage, fds: list[int]) -> bool:
        """Handles a decoded message. Returns True if a call has begun, which then owns the descriptors."""
        if isinstance(message, Cancel):
            if (call := self.calls.get(message.target)) is not None:
                call.cancel()
        elif isinstance(message, Hello):
            self._introduce(message)
        elif not self._introduced:
            self._hang_up(ProtocolError("the first message of a connection must be Hello"))
        elif isinstance(message, Signal):
            self._services.signal(self, message)
        elif message.id in self.calls:
            self._hang_up(ProtocolError(f"request {message.id} is under way: its number may not be used again yet"))
        elif len(fds) > message.descriptors:
            most = message.descriptors or "none"
            self._fail(message.id, InvalidRequest(f"{len(fds)} descriptors came with a request that takes {most}"))
        else:
            return self._begin(message, fds)
        return False

    def broken(self, error: ProtocolError) -> None:
        self._hang_up(error)

    def congested(self, is_congested: bool) -> None:
        for call in self.calls.values():
            if call.run is not None:
                call.run.hold(is_congested)

    def closed(self) -> None:
        self._handshake.cancel()
        self.cancel_calls()
        self._services.gone(self)

    # --- requests -----------------------------------------------------------------------------------------------------

    def started(self, call: ClientCall, run: CallRun) -> None:
        """Called when an engine begins to work on the call. The run is held while the client does not read."""
        call.run = run
        if self._connection.congested:
            run.hold(True)

    def _introduce(self, hello: Hello) -> None:
        if self._introduced:
            self._fail(hello.id, ProtocolError("this connection has already sent Hello"))
            return
        if hello.token:
            try:
                self._show(hello.token)
            except DjinnError as error:
                self._fail(hello.id, error)
                self._leave()
                return
        self._introduced = True
        self._connection.limit_frames(self._services.limits.request_bytes)
        self._handshake.cancel()
        told = (self.fd, self.peer.pid, self.user, self.name, hello.client[:80])
        log.debug("client_connected fd=%d pid=%d user=%d name=%s client=%s", *told)
        self.send(Welcome(id=hello.id, version=__version__, user=self.user, admin=self.is_admin, name=self.name))

    def _show(self, token: str) -> None:
        """Authenticates the connection by a token. Raises NotAuthenticated, QuotaExceeded."""
        self.bearer = self._services.authenticate(self, token)
        if self.bearer.user != self.user:
            self._count_for(self.bearer.user)
            self._connection.change_traffic(self.traffic)

    def _count_for(self, user: int) -> None:
        self.user = user
        self.tenant, self.traffic, self.windows = self._services.accounts_of(user)

    def _too_late(self) -> None:
        self._hang_up(ProtocolError(f"no Hello came within {self._services.limits.handshake:g} s"))

    def _not_understood(self, payload: bytes, error: ProtocolError) -> None:
        number = request_id_of(payload)
        if number is None or number in self.calls or not self._introduced:
            self._hang_up(error)
        else:
            self._fail(number, InvalidRequest(error.message))

    def _begin(self, request: Request, fds: list[int]) -> bool:
        is_ordinary = type(request) not in _ALWAYS_ADMITTED
        try:
            self._expect_room(is_ordinary)
            if is_ordinary:
                self.tenant.ledger.charge(REQUESTS)
                self._ordinary += 1
        except DjinnError as error:
            self._fail(request.id, error)
            return False
        call = self.calls[request.id] = ClientCall(self, request.id, fds, is_ordinary, self._connection.take_charge())
        self._services.begun()
        call.task = asyncio.create_task(self._services.handle(call, request))
        call.task.add_done_callback(lambda task: self._finish(call, task))
        return True

    def _expect_room(self, is_ordinary: bool) -> None:
        """Checks the limits on unfinished requests of this connection and of the daemon. Requests that are always
        admitted have a limit of their own on each connection. Raises Retry."""
        limits = self._services.limits
        others = self._ordinary if is_ordinary else len(self.calls) - self._ordinary
        if others >= limits.requests_per_connection:
            raise Retry(f"this connection has {others} unfinished requests, its limit: wait for one of them")
        if is_ordinary and self._services.unfinished >= limits.requests:
            raise Retry(f"the daemon has {limits.requests:,} unfinished requests, its limit")

    def _finish(self, call: ClientCall, task: asyncio.Task[FinalReply]) -> None:
        del self.calls[call.id]
        call.run = None  # which keeps the call
        if call.is_ordinary:
            self._ordinary -= 1
            self.tenant.ledger.release(REQUESTS)
        if call.nbytes:
            self.traffic.give_back(call.nbytes)
        call.release_window()
        self.traffic.drop(call.fds)
        self._services.ended()
        error = call.fate if task.cancelled() else task.exception()
        if error is None:
            self._answer(call.id, task.result())
        elif isinstance(error, DjinnError):
            self._fail(call.id, error)
        else:
            self._fail_ours(call.id, error)

    def _answer(self, number: int, answer: FinalReply) -> None:
        message, fds = answer
        if fds:
            fds = self.windows.hand_over(fds)
        try:
            frame = encode(message, len(fds))
        except Exception as error:  # the reply has a value that msgpack cannot encode
            self.traffic.discard(fds)
            self._fail_ours(number, error)
            return
        self._held_fds += len(fds)
        self._services.after(self._send_with_fds, frame, fds)

    def _fail_ours(self, number: int, error: BaseException) -> None:
        log.error("request_failed user=%d", self.user, exc_info=error)
        self._fail(number, DjinnError(f"the daemon failed: {error!r}; its log has the details"))

    def _send_with_fds(self, frame: bytes, fds: Sequence[int]) -> None:
        self._held_fds -= len(fds)
        self._connection.send(frame, fds)

    def _leave(self) -> None:
        self._leaving = True
        self._services.after(self._connection.close_when_sent)

    def _fail(self, number: int, error: DjinnError) -> None:
        self.send(Failure(id=number, code=error.code, message=error.message, data=error.data))

    def _hang_up(self, error: ProtocolError) -> None:
        """Ends the connection of a client that breaks the protocol: sends the error and cancels its requests."""
        log.info("client_refused fd=%d pid=%d user=%d reason=%s", self.fd, *self.peer, error)
        self._fail(0, error)
        self.cancel_calls()
        self._leave()
