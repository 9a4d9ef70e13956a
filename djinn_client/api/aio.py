"""The asyncio client: the same steps, waited for through the running loop's readiness callbacks."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager, suppress
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from djinn_client.arguments.messages import Message
from djinn_client.arguments.options import ChatOptions, GenerateOptions
from djinn_client.errors import DjinnError
from djinn_client.handover.kv import KV, exported_kv
from djinn_client.handover.session_import import SessionImport, import_of_file, import_of_kv, save
from djinn_client.old_names import former_property
from djinn_client.protocol import Class, Generated, PauseReply, Piece, SessionInfo, SignalKind, Tier
from djinn_client.protocol.fields.breakpoints import BreakpointInfo, When
from djinn_client.protocol.fields.edits import EditInfo, Op
from djinn_client.protocol.fields.scheduling import Why
from djinn_client.session.calls import SessionSteps
from djinn_client.session.streaming import StreamSteps
from djinn_client.tensors.cache import Cache
from djinn_client.tensors.hits import Hit
from djinn_client.tensors.resume_points import ResumePoint
from djinn_client.transport.aio_steps import run
from djinn_client.transport.connection import OnProgress
from djinn_client.whitebox import breakpoint_calls, interventions, probing
from djinn_client.whitebox.breakpoint_calls import Breakpoint
from djinn_client.whitebox.interventions import Function, Intervention
from djinn_client.whitebox.probing import Capture, Edit

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from typing import Any, Self, Unpack

    import numpy as np
    import numpy.typing as npt

T = TypeVar("T")
AsyncEdit: TypeAlias = "Edit[Coroutine[Any, Any, None]]"
AsyncBreakpoint: TypeAlias = "Breakpoint[Coroutine[Any, Any, None]]"
AsyncIntervention: TypeAlias = "Intervention[Coroutine[Any, Any, None]]"


class AsyncSession:
    """`Session` for asyncio: the same calls, awaited.

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
        priority: Class | None = None,
        address: str | None = None,
        token: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> None:
        self._steps = SessionSteps(address, token)
        self._opening = partial(self._steps.open, model, priority, on_progress)

    @classmethod
    def _over(cls, steps: SessionSteps, session: str) -> Self:
        """The object for a session that the daemon has. Opening it attaches."""
        opened = cls.__new__(cls)
        opened._steps = steps
        opened._opening = partial(steps.attach, session)
        return opened

    async def open(self) -> Self:
        """Opens the session unless it is open. Raises what `Session` raises."""
        await run(self._opening())
        return self

    @property
    def id(self) -> str:
        return self._steps.info.id

    @property
    def info(self) -> SessionInfo:
        """The session as it was when it was opened or attached."""
        return self._steps.info

    @former_property
    async def token_ids(self) -> list[int]:
        """See Session.token_ids."""
        return await run(self._steps.token_ids())

    async def generate(
        self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> Generated:
        """See Session.generate."""
        return await run(self._steps.generate(prompt, options))

    def stream(self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]) -> AsyncStream:
        """See Session.stream."""
        return AsyncStream(self._steps.stream(prompt, options))

    async def chat(self, said: str | Iterable[Message], **options: Unpack[ChatOptions]) -> Generated:
        """See Session.chat."""
        return await run(self._steps.chat(said, options))

    def chat_stream(self, said: str | Iterable[Message], **options: Unpack[ChatOptions]) -> AsyncStream:
        """See Session.chat_stream."""
        return AsyncStream(self._steps.chat_stream(said, options))

    @property
    def messages(self) -> list[Message]:
        """See Session.messages."""
        return self._steps.messages

    @messages.setter
    def messages(self, messages: Iterable[Message]) -> None:
        self._steps.messages = list(messages)

    async def forward(self, token_ids: Iterable[int]) -> npt.NDArray[np.float32]:
        """See Session.forward."""
        return await run(self._steps.forward(token_ids))

    async def truncate(self, length: int) -> None:
        """See Session.truncate."""
        await run(self._steps.truncate(length))

    async def keep_record(self, body: bytes = b"", *, name: str = "") -> str:
        """See Client.keep_record."""
        return await run(self._steps.keep_record(body, name))

    async def fork(self, priority: Class | None = None) -> Self:
        """See Session.fork. `async with await s.fork() as t` closes the new session."""
        steps = await run(self._steps.fork(priority))
        return self._over(steps, steps.info.id)

    async def steer(
        self,
        point: str | Iterable[str],
        vector: Any = None,
        *,
        op: Op = "add",
        scale: float = 1.0,
        low: float | None = None,
        high: float | None = None,
        positions: Iterable[int] | None = None,
    ) -> AsyncEdit:
        """See Session.steer. `await edit.remove()` ends it."""
        steps = probing.steer(self._steps, point, vector, op, scale, low, high, positions)
        return Edit(self._steps, await run(steps), run)

    async def patch(
        self, activation: Any, point: str | None = None, *, positions: Iterable[int] | None = None
    ) -> AsyncEdit:
        """See Session.patch."""
        return Edit(self._steps, await run(probing.patch(self._steps, activation, point, positions)), run)

    async def unsteer(self, edit: AsyncEdit | int | None = None) -> None:
        """See Session.unsteer."""
        await run(probing.unsteer(self._steps, edit))

    async def edits(self) -> list[EditInfo]:
        """See Session.edits."""
        return await run(probing.edits(self._steps))

    def capture(self, points: str | Iterable[str]) -> Capture[Coroutine[Any, Any, Cache]]:
        """`await s.capture(points).run("text")`. See Session.capture."""
        return Capture(self._steps, points, run)

    async def breakpoint(
        self,
        point: str | None = None,
        *,
        layer: int | None = None,
        when: When | None = None,
        every: int = 1,
        positions: Iterable[int] | None = None,
    ) -> AsyncBreakpoint:
        """See Session.breakpoint. `await breakpoint.remove()` ends it."""
        steps = breakpoint_calls.add(self._steps, point, layer, when, every, positions)
        return Breakpoint(self._steps, await run(steps), run)

    async def breakpoints(self) -> list[BreakpointInfo]:
        """See Session.breakpoints."""
        return await run(breakpoint_calls.breakpoints(self._steps))

    async def intervene(
        self, point: str, function: Function, *, local: bool = False, when: When = "every"
    ) -> AsyncIntervention:
        """See Session.intervene. The function is a plain one; a local one the loop waits for."""
        steps = interventions.add(self._steps, point, function, local, when)
        return Intervention(self._steps, await run(steps), run)

    async def run(
        self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]
    ) -> Hit | Generated:
        """See Session.run."""
        return await run(breakpoint_calls.run_on(self._steps, prompt, options))

    async def resume(self, replacement: Any = None, **options: Unpack[GenerateOptions]) -> Hit | Generated:
        """See Session.resume."""
        return await run(breakpoint_calls.resume(self._steps, replacement, options))

    async def resume_from(
        self, start: ResumePoint, replacement: Any = None, **options: Unpack[GenerateOptions]
    ) -> Hit | Generated:
        """See Session.resume_from."""
        return await run(breakpoint_calls.resume_from(self._steps, start, replacement, options))

    async def kv(self) -> KV:
        """See Session.kv."""
        answer = await run(self._steps.export(kv=True))
        return exported_kv(answer.message, answer.fds)

    async def save(self, path: str | os.PathLike[str], *, kv: bool | None = None) -> None:
        """See Session.save. The file is written in a thread."""
        answer = await run(self._steps.export(kv))
        await asyncio.to_thread(save, path, self._steps.info, answer)

    @classmethod
    async def attach(cls, session: str, *, address: str | None = None, token: str | None = None) -> Self:
        """See Session.attach."""
        return await cls._over(SessionSteps(address, token), session).open()

    @classmethod
    async def from_kv(
        cls,
        model: str,
        tokens: Iterable[int],
        kv: Any,
        *,
        priority: Class | None = None,
        address: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """See Session.from_kv. A copy is made in a thread."""
        handed = await asyncio.to_thread(import_of_kv, model, tokens, kv, priority, address, on_progress)
        return await cls._imported(handed, address, on_progress)

    @classmethod
    async def load(
        cls,
        path: str | os.PathLike[str],
        *,
        kv: bool | None = None,
        model: str | None = None,
        priority: Class | None = None,
        address: str | None = None,
        on_progress: OnProgress | None = None,
    ) -> Self:
        """See Session.load. The file is read in a thread."""
        handed = await asyncio.to_thread(import_of_file, path, model, priority, kv)
        return await cls._imported(handed, address, on_progress)

    @classmethod
    async def _imported(cls, handed: SessionImport, address: str | None, on_progress: OnProgress | None) -> Self:
        steps = SessionSteps(address)
        await run(steps.import_(handed.request, handed.fds, on_progress))
        return cls._over(steps, steps.info.id)

    async def signal(self, kind: SignalKind, *, expected_s: float | None = None, tool: str = "") -> None:
        """See Session.signal."""
        await run(self._steps.signal(kind, expected_s, tool))

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
        if not self._steps.ended:
            await self.signal("compute")

    async def pause(self, tier: Tier = "host") -> PauseReply:
        """See Session.pause."""
        return await run(self._steps.pause(tier))

    async def unpause(self) -> None:
        """See Session.unpause."""
        await run(self._steps.unpause())

    async def set_priority(self, priority: Class) -> None:
        """See Session.set_priority."""
        await run(self._steps.set_priority(priority))

    async def why(self) -> Why:
        """See Session.why."""
        return await run(self._steps.why())

    async def close(self) -> None:
        """See Session.close."""
        await run(self._steps.close())

    async def detach(self) -> None:
        """See Session.detach."""
        self._steps.detach()

    async def __aenter__(self) -> Self:
        return await self.open()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with suppress(*(() if error is None else (DjinnError,))):  # the caller must see the first error
            await self.close()


class AsyncStream:
    """`Stream` for asyncio. Closing needs no await: it is one message to the daemon."""

    def __init__(self, steps: StreamSteps) -> None:
        self._steps = steps

    @property
    def result(self) -> Generated:
        """Raises SessionStateError where the stream was not read to its end."""
        return self._steps.result

    @property
    def hit(self) -> Hit | None:
        """See Stream.hit."""
        return self._steps.hit

    def close(self) -> None:
        self._steps.close()

    async def aclose(self) -> None:
        """close(), under the name that contextlib.aclosing() calls."""
        self._steps.close()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        piece = await run(self._steps.next())
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        self.close()
