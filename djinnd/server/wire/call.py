"""One request under way: its descriptors and windows, the engine's work on it, and its final reply."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

from djinn_client.errors import Cancelled, DjinnError, InvalidRequest
from djinn_client.protocol import Piece, Progress, Reply
from djinnd.messages import Loading
from djinnd.server.wire.memfds import expect_memfd

if TYPE_CHECKING:
    from djinnd.server.wire.client import ConnectedClient


class FinalReply(NamedTuple):
    """A final reply with its descriptors."""

    message: Reply
    fds: Sequence[int] = ()


class CallRun(Protocol):
    """The work of an engine for a call."""

    @property
    def state(self) -> Literal["queued", "running", "held"]: ...
    def cancel(self) -> None: ...
    def hold(self, held: bool) -> None: ...


class ClientCall:
    """A request under way.

    - `id`: of the request, as the client has numbered it.
    - `run`: set while an engine works on it.
    - `fds`: the descriptors that came with it. The call closes the rest of them at its end.
    - `is_ordinary`: it counts towards the limits on unfinished requests of its connection and its user.
    - `nbytes`: size of its frame, charged to the user.
    """

    def __init__(
        self, client: ConnectedClient, number: int, fds: list[int], is_ordinary: bool = True, nbytes: int = 0
    ) -> None:
        self.client = client
        self.id = number
        self.fds = fds
        self.is_ordinary = is_ordinary
        self.nbytes = nbytes
        self.window_bytes = 0  # bytes of windows that are reserved
        self.whole = self  # the call as the client sent it; for a call made by `part`, the call that it belongs to
        self.received = time.monotonic()
        self.run: CallRun | None = None
        self.fate: DjinnError = Cancelled("the request was cancelled")  # the client's error if cancelled
        self.task: asyncio.Task[FinalReply]

    def send(self, message: Piece | Progress) -> None:
        self.client.send(message)

    def flush(self) -> None:
        self.client.flush()

    def tell_loading(self, loading: Loading) -> None:
        done, total = loading.done, loading.total
        self.send(Progress(id=self.id, model=loading.model, stage=loading.stage, done=done, total=total))

    @property
    def descriptor(self) -> int:
        """The memfd that came with the request. The call keeps it, and closes it at its end. Raises InvalidRequest."""
        if len(self.fds) != 1:
            raise InvalidRequest(f"this request needs one descriptor; {len(self.fds)} came")
        expect_memfd(self.fds[0])
        return self.fds[0]

    def reserve_window(self, nbytes: int) -> None:
        """Reserves room for a window of this size, which the call will create. Raises QuotaExceeded."""
        self.client.windows.reserve(nbytes)
        self.window_bytes += nbytes

    def part(self) -> ClientCall:
        """Creates a call for a part of this call's work that has an engine run of its own. The current task works on
        the part, and ends with it."""
        part = ClientCall(self.client, self.id, [], is_ordinary=False)
        task = asyncio.current_task()
        assert task is not None
        part.whole, part.task = self.whole, task
        return part

    def release_window(self) -> None:
        """Releases the reserved windows when the call ends."""
        if self.window_bytes:
            self.client.windows.release(self.window_bytes)

    def take_descriptors(self) -> list[int]:
        """Returns the descriptors that came with the request. The caller now owns them, and they are no longer
        counted."""
        taken, self.fds = self.fds, []
        self.client.traffic.taken(len(taken))
        return taken

    def cancel(self) -> None:
        if self.run is not None:
            self.run.cancel()
        else:
            self.task.cancel()
