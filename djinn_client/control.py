"""Calls that belong to no session: what the daemon holds, and what it should hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from djinn_client.connection import Connection, OnProgress, connect
from djinn_client.options import build
from djinn_client.protocol import (
    CloseSession,
    Done,
    GetStatus,
    ListModels,
    ListSessions,
    LoadModel,
    ModelInfo,
    ModelReply,
    Models,
    Ping,
    Reply,
    Request,
    SessionInfo,
    Sessions,
    StatusReply,
    UnloadModel,
    Welcome,
)
from djinn_client.steps import Steps, run

if TYPE_CHECKING:
    from typing import Self

R = TypeVar("R", bound=Reply)


class Client:
    """A connection for such calls, kept from one to the next; a lost one is made anew. For one thread at a time.

    Every call raises ConnectionLost where no daemon answers, and the daemon's own error otherwise.
    """

    def __init__(self, address: str | None = None) -> None:
        self._address = address
        self._connection: Connection | None = None

    def ping(self) -> None:
        """An empty call."""
        self._call(build(Ping), Done)

    def welcome(self) -> Welcome:
        """What the daemon said of itself and of the caller."""
        return run(self._connected()).welcome

    def status(self, *, check: bool = False) -> StatusReply:
        """`check` audits the daemon's pools too; `integrity` then has what was found."""
        return self._call(build(GetStatus, check=check), StatusReply)

    def models(self) -> list[ModelInfo]:
        return self._call(build(ListModels), Models).models

    def sessions(self) -> list[SessionInfo]:
        """The caller's sessions; every user's for an administrator."""
        return self._call(build(ListSessions), Sessions).sessions

    def load(self, model: str, *, kv_bytes: int = 0, on_progress: OnProgress | None = None) -> ModelInfo:
        """Returns when the model is ready. `kv_bytes` 0 leaves the size of its page pool to the daemon."""
        return self._call(build(LoadModel, model=model, kv_bytes=kv_bytes), ModelReply, on_progress).model

    def unload(self, model: str, *, force: bool = False) -> None:
        """`force` closes the sessions that use the model; without it they are an error."""
        self._call(build(UnloadModel, model=model, force=force), Done)

    def close_session(self, session: str) -> None:
        """Raises SessionNotFound."""
        self._call(build(CloseSession, session=session), Done)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _call(self, request: Request, expected: type[R], on_progress: OnProgress | None = None) -> R:
        return run(self._steps(request, expected, on_progress))

    def _steps(self, request: Request, expected: type[R], on_progress: OnProgress | None) -> Steps[R]:
        connection = yield from self._connected()
        return (yield from connection.call(request, expected, on_progress)).message

    def _connected(self) -> Steps[Connection]:
        if self._connection is None or self._connection.closed:
            self._connection = yield from connect(self._address)
        return self._connection


def status(*, check: bool = False, address: str | None = None) -> StatusReply:
    """What `djinnctl status --json` prints. See Client.status."""
    with Client(address) as client:
        return client.status(check=check)


def models(*, address: str | None = None) -> list[ModelInfo]:
    """The models that the daemon knows, loaded or not."""
    with Client(address) as client:
        return client.models()


def sessions(*, address: str | None = None) -> list[SessionInfo]:
    """See Client.sessions."""
    with Client(address) as client:
        return client.sessions()


def load(
    model: str, *, kv_bytes: int = 0, on_progress: OnProgress | None = None, address: str | None = None
) -> ModelInfo:
    """See Client.load."""
    with Client(address) as client:
        return client.load(model, kv_bytes=kv_bytes, on_progress=on_progress)


def unload(model: str, *, force: bool = False, address: str | None = None) -> None:
    """See Client.unload."""
    with Client(address) as client:
        client.unload(model, force=force)


def close(session: str, *, address: str | None = None) -> None:
    """Closes any of the caller's sessions by its id. Raises SessionNotFound."""
    with Client(address) as client:
        client.close_session(session)
