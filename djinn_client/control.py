"""Calls that belong to no session: what the daemon holds, and what it should hold."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from djinn_client.connection import Connection, OnProgress, connect
from djinn_client.options import PlacingOptions, build, placing_fields
from djinn_client.placing import ModelPlan
from djinn_client.protocol import (
    BudgetReply,
    CloseSession,
    Done,
    GetStatus,
    GetTrace,
    ListModels,
    ListSessions,
    LoadModel,
    ModelInfo,
    ModelReply,
    Models,
    Ping,
    PlanModel,
    PlanReply,
    Reply,
    Request,
    Restart,
    SessionInfo,
    Sessions,
    SetBudget,
    StatusReply,
    TraceReply,
    UnloadModel,
    Welcome,
)
from djinn_client.steps import Steps, run

if TYPE_CHECKING:
    from typing import Self, Unpack

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

    def load(
        self,
        model: str,
        *,
        kv_bytes: int = 0,
        on_progress: OnProgress | None = None,
        **placing: Unpack[PlacingOptions],
    ) -> ModelInfo:
        """Returns when the model is ready. `kv_bytes` 0 leaves the size of its page pool to the daemon. `placing`: see
        PlacingOptions; a model that is loaded otherwise already is an InvalidRequest, one that does not fit so is
        OutOfMemory."""
        request = build(LoadModel, model=model, kv_bytes=kv_bytes, placing=placing_fields(placing))
        return self._call(request, ModelReply, on_progress).model

    def plan(
        self, model: str, *, memory_bytes: int = 0, kv_bytes: int = 0, **placing: Unpack[PlacingOptions]
    ) -> ModelPlan:
        """What loading the model would come to, and how fast it would run, in a budget of `memory_bytes` of device
        memory (0: the daemon's). Loads nothing, and frees nothing. `placing`: see PlacingOptions. Raises OutOfMemory
        with the figure where nothing fits."""
        fields = placing_fields(placing)
        request = build(PlanModel, model=model, memory_bytes=memory_bytes, kv_bytes=kv_bytes, placing=fields)
        return self._call(request, PlanReply).plan

    def set_budget(self, memory_bytes: int) -> BudgetReply:
        """Gives the daemon so much device memory, for administrators, while sessions run: blocks that no longer fit
        stream, and become resident again when there is more. Raises OutOfMemory, with the figure that it could go down
        to, where that does not suffice; nothing has changed then."""
        return self._call(build(SetBudget, memory_bytes=memory_bytes), BudgetReply)

    def trace(self, *, steps: int = 4, seconds: float = 10.0) -> TraceReply:
        """What the device does in its next `steps` steps (1 to 100), for administrators. Returns when they have been
        run, or after `seconds` (at most 60) with what there is then. Raises Retry while another trace is recorded."""
        return self._call(build(GetTrace, steps=steps, seconds=seconds), TraceReply)

    def unload(self, model: str, *, force: bool = False) -> None:
        """`force` closes the sessions that use the model; without it they are an error."""
        self._call(build(UnloadModel, model=model, force=force), Done)

    def close_session(self, session: str) -> None:
        """Raises SessionNotFound."""
        self._call(build(CloseSession, session=session), Done)

    def restart(self, *, warm: bool = False) -> None:
        """Has the daemon end its work and start again, for administrators; `warm` keeps the loaded models' weights in
        shared memory. Returns when it has begun to. Sessions do not survive it."""
        self._call(build(Restart, warm=warm), Done)

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
    model: str,
    *,
    kv_bytes: int = 0,
    on_progress: OnProgress | None = None,
    address: str | None = None,
    **placing: Unpack[PlacingOptions],
) -> ModelInfo:
    """See Client.load."""
    with Client(address) as client:
        return client.load(model, kv_bytes=kv_bytes, on_progress=on_progress, **placing)


def plan(
    model: str,
    *,
    memory_bytes: int = 0,
    kv_bytes: int = 0,
    address: str | None = None,
    **placing: Unpack[PlacingOptions],
) -> ModelPlan:
    """See Client.plan."""
    with Client(address) as client:
        return client.plan(model, memory_bytes=memory_bytes, kv_bytes=kv_bytes, **placing)


def set_budget(memory_bytes: int, *, address: str | None = None) -> BudgetReply:
    """See Client.set_budget."""
    with Client(address) as client:
        return client.set_budget(memory_bytes)


def trace(*, steps: int = 4, seconds: float = 10.0, address: str | None = None) -> TraceReply:
    """See Client.trace."""
    with Client(address) as client:
        return client.trace(steps=steps, seconds=seconds)


def unload(model: str, *, force: bool = False, address: str | None = None) -> None:
    """See Client.unload."""
    with Client(address) as client:
        client.unload(model, force=force)


def close(session: str, *, address: str | None = None) -> None:
    """Closes any of the caller's sessions by its id. Raises SessionNotFound."""
    with Client(address) as client:
        client.close_session(session)
