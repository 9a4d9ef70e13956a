"""The asyncio client: the same steps, waited for through the running loop's readiness callbacks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from djinn_client.api.own_state import OwnState
from djinn_client.arguments.messages import Message
from djinn_client.arguments.options import ChatOptions, GenerateOptions
from djinn_client.errors import DjinnError
from djinn_client.handover import session_import
from djinn_client.handover.session_import import SessionImport
from djinn_client.old_names import former_property
from djinn_client.protocol import Class, Piece
from djinn_client.session.calls import SessionCalls
from djinn_client.session.streaming import StreamState
from djinn_client.tensors.cache import Cache
from djinn_client.transport import aio_steps
from djinn_client.transport.aio_steps import awaited
from djinn_client.transport.connection import OnProgress
from djinn_client.whitebox import breakpoint_calls, interventions, probing
from djinn_client.whitebox.breakpoint_calls import Breakpoint
from djinn_client.whitebox.handles import handled
from djinn_client.whitebox.interventions import Intervention
from djinn_client.whitebox.probing import Capture, Edit

if TYPE_CHECKING:
    from typing import Self, Unpack

AsyncEdit = Edit[Coroutine[Any, Any, None]]
AsyncBreakpoint = Breakpoint[Coroutine[Any, Any, None]]
AsyncIntervention = Intervention[Coroutine[Any, Any, None]]


class AsyncSession(OwnState):
    """`Session` for asyncio: the same calls, awaited; also Capture.run, and the `remove` of handles.

        async with djinn.AsyncSession("djinn-tiny") as s:
            async for piece in s.stream("def fibonacci(", max_tokens=32):
                print(piece.text, end="")

    The session is opened by `async with`, or by awaiting open(). Cancelling a task that waits in a call stops the work
    in the daemon within one step, and the session stays usable. A second call while one runs raises SessionBusy.
    """

    def __init__(
        self,
        model: str,
        *,
        adapter: str | os.PathLike[str] | None = None,
        priority: Class | None = None,
        address: str | None = None,
        token: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._calls = SessionCalls(address, token)
        self._opening = partial(self._calls.open, model, priority, on_progress, adapter)

    @classmethod
    def _over(cls, calls: SessionCalls, session: str) -> Self:
        """The object for a session that the daemon has. Opening it attaches."""
        opened = cls.__new__(cls)
        opened._calls = calls
        opened._opening = partial(calls.attach, session)
        return opened

    async def open(self) -> Self:
        """Opens the session unless it is open. Raises what `Session` raises."""
        await aio_steps.run(self._opening())
        return self

    token_ids = former_property(awaited(SessionCalls.token_ids))
    generate = awaited(SessionCalls.generate)

    def stream(self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """See Session.stream."""
        return AsyncStream(self._calls.stream(prompt, options))

    chat = awaited(SessionCalls.chat)

    def chat_stream(self, said: str | Iterable[Message], **options: Unpack[ChatOptions]) -> AsyncStream:
        """See Session.chat_stream."""
        return AsyncStream(self._calls.chat_stream(said, options))

    forward = awaited(SessionCalls.forward)
    truncate = awaited(SessionCalls.truncate)
    keep_record = awaited(SessionCalls.keep_record)

    async def fork(self, priority: Class | None = None) -> Self:
        """See Session.fork. `async with await s.fork() as t` closes the new session."""
        fork = await aio_steps.run(self._calls.fork(priority))
        return self._over(fork, fork.info.id)

    steer = awaited(handled(AsyncEdit, aio_steps.run, probing.steer))
    patch = awaited(handled(AsyncEdit, aio_steps.run, probing.patch))
    unsteer = awaited(probing.unsteer)
    edits = awaited(probing.edits)

    def capture(self, points: str | Iterable[str]) -> Capture[Coroutine[Any, Any, Cache]]:
        """`await s.capture(points).run("text")`. See Session.capture."""
        return Capture(self._calls, points, aio_steps.run)

    breakpoint = awaited(handled(AsyncBreakpoint, aio_steps.run, breakpoint_calls.breakpoint))
    breakpoints = awaited(breakpoint_calls.breakpoints)
    intervene = awaited(handled(AsyncIntervention, aio_steps.run, interventions.intervene))
    run = awaited(breakpoint_calls.run)
    resume = awaited(breakpoint_calls.resume)
    resume_from = awaited(breakpoint_calls.resume_from)

    kv = awaited(session_import.kv)

    async def save(
        self, path: str | os.PathLike[str], *, kv: bool | None = None, on_progress: OnProgress | None = None
    ) -> None:
        """See Session.save. The file is written in a thread."""
        answer = await aio_steps.run(self._calls.export(kv, on_progress))
        await asyncio.to_thread(session_import.save, path, self._calls.info, answer)

    @classmethod
    async def attach(cls, session: str, *, address: str | None = None, token: str | None = None) -> Self:
        """See Session.attach."""
        return await cls._over(SessionCalls(address, token), session).open()

    @classmethod
    async def from_kv(
        cls,
        model: str,
        tokens: Iterable[int],
        kv: Any,
        *,
        priority: Class | None = None,
        address: str | None = None,
        token: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """See Session.from_kv. A copy is made in a thread."""
        handed = await asyncio.to_thread(
            session_import.import_of_kv, model, tokens, kv, priority, address, token, on_progress
        )
        return await cls._imported(handed, address, token, on_progress)

    @classmethod
    async def load(
        cls,
        path: str | os.PathLike[str],
        *,
        kv: bool | None = None,
        model: str | None = None,
        priority: Class | None = None,
        address: str | None = None,
        token: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """See Session.load. The file is read in a thread."""
        handed = await asyncio.to_thread(session_import.import_of_file, path, model, priority, kv)
        return await cls._imported(handed, address, token, on_progress)

    @classmethod
    async def _imported(
        cls, handed: SessionImport, address: str | None, token: str | None, on_progress: OnProgress | None
    ) -> Self:
        calls = SessionCalls(address, token)
        await aio_steps.run(calls.enter(handed.request, on_progress, handed.fds))
        return cls._over(calls, calls.info.id)

    signal = awaited(SessionCalls.signal)

    @asynccontextmanager
    async def io_wait(self, expected_s: float | None = None, *, tool: str = "") -> AsyncIterator[None]:
        """`async with s.io_wait(tool="search"): await search()`. See Session.io_wait."""
        await self.signal("io_wait", expected_s=expected_s, tool=tool)
        try:
            yield
        except BaseException:
            with suppress(DjinnError):  # the caller must see the first error
                await self.signal("compute")
            raise
        if not self._calls.ended:
            await self.signal("compute")

    pause = awaited(SessionCalls.pause)
    unpause = awaited(SessionCalls.unpause)
    set_priority = awaited(SessionCalls.set_priority)
    why = awaited(SessionCalls.why)
    close = awaited(SessionCalls.close)

    async def detach(self) -> None:
        """See Session.detach."""
        self._calls.detach()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        with suppress(*(() if error is None else (DjinnError,))):  # the caller must see the first error
            await self.close()


class AsyncStream(StreamState):
    """`Stream` for asyncio. Closing needs no await."""

    async def aclose(self) -> None:
        """close(), under the name that contextlib.aclosing() calls."""
        self._steps.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        piece = await aio_steps.run(self._steps.next())
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()
