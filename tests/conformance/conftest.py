"""One set of cases for both clients. They take nothing but an address, so they run against any djinnd.

Cases are written once, as coroutines; the blocking client takes part through `Blocking`, which does each of its calls
in a thread.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support.daemon import Daemon
from tests.support.remote import RemoteGateway, token_of

MODEL = "djinn-tiny"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> object:
    """Runs the cases that are coroutines, each in a loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    asyncio.run(pyfuncitem.obj(**arguments))
    return True


class BlockingStream:
    def __init__(self, stream: djinn.Stream) -> None:
        self._stream = stream

    @property
    def result(self) -> djinn.Generated:
        return self._stream.result

    def close(self) -> None:
        self._stream.close()

    def __aiter__(self) -> BlockingStream:
        return self

    async def __anext__(self) -> djinn.Piece:
        piece = await asyncio.to_thread(next, self._stream, None)
        if piece is None:
            raise StopAsyncIteration
        return piece


class BlockingEdit:
    def __init__(self, edit: djinn.Edit[None]) -> None:
        self.edit = edit
        self.id = edit.id

    async def remove(self) -> None:
        await asyncio.to_thread(self.edit.remove)


class BlockingCapture:
    def __init__(self, capture: djinn.Capture[djinn.Cache]) -> None:
        self._capture = capture

    async def run(self, prompt: Any = None, **options: Any) -> djinn.Cache:
        return await asyncio.to_thread(self._capture.run, prompt, **options)


class Blocking:
    """A Session with the names and the awaits of an AsyncSession."""

    def __init__(self, session: djinn.Session) -> None:
        self._session = session

    @property
    def id(self) -> str:
        return self._session.id

    @property
    def info(self) -> djinn.SessionInfo:
        return self._session.info

    async def token_ids(self) -> list[int]:
        return await asyncio.to_thread(self._session.token_ids)

    async def generate(self, prompt: Any = None, **options: Any) -> djinn.Generated:
        return await asyncio.to_thread(self._session.generate, prompt, **options)

    def stream(self, prompt: Any = None, **options: Any) -> BlockingStream:
        return BlockingStream(self._session.stream(prompt, **options))

    @property
    def messages(self) -> list[Any]:
        return self._session.messages

    @messages.setter
    def messages(self, messages: list[Any]) -> None:
        self._session.messages = messages

    async def chat(self, said: Any, **options: Any) -> djinn.Generated:
        return await asyncio.to_thread(self._session.chat, said, **options)

    def chat_stream(self, said: Any, **options: Any) -> BlockingStream:
        return BlockingStream(self._session.chat_stream(said, **options))

    async def forward(self, token_ids: Iterable[int]) -> npt.NDArray[np.float32]:
        return await asyncio.to_thread(self._session.forward, token_ids)

    async def truncate(self, length: int) -> None:
        await asyncio.to_thread(self._session.truncate, length)

    async def fork(self, **options: Any) -> Blocking:
        return Blocking(await asyncio.to_thread(self._session.fork, **options))

    async def steer(self, *arguments: Any, **options: Any) -> BlockingEdit:
        return BlockingEdit(await asyncio.to_thread(self._session.steer, *arguments, **options))

    async def patch(self, *arguments: Any, **options: Any) -> BlockingEdit:
        return BlockingEdit(await asyncio.to_thread(self._session.patch, *arguments, **options))

    async def unsteer(self, edit: BlockingEdit | int | None = None) -> None:
        await asyncio.to_thread(self._session.unsteer, edit.edit if isinstance(edit, BlockingEdit) else edit)

    async def edits(self) -> list[djinn.EditInfo]:
        return await asyncio.to_thread(self._session.edits)

    def capture(self, points: Any) -> BlockingCapture:
        return BlockingCapture(self._session.capture(points))

    async def signal(self, kind: Any, **options: Any) -> None:
        await asyncio.to_thread(self._session.signal, kind, **options)

    @asynccontextmanager
    async def io_wait(self, **options: Any) -> AsyncIterator[None]:
        with self._session.io_wait(**options):
            yield

    async def pause(self, **options: Any) -> djinn.PauseReply:
        return await asyncio.to_thread(self._session.pause, **options)

    async def unpause(self) -> None:
        await asyncio.to_thread(self._session.unpause)

    async def set_priority(self, priority: Any) -> None:
        await asyncio.to_thread(self._session.set_priority, priority)

    async def why(self) -> djinn.Why:
        return await asyncio.to_thread(self._session.why)

    async def close(self) -> None:
        await asyncio.to_thread(self._session.close)

    async def detach(self) -> None:
        await asyncio.to_thread(self._session.detach)


Session = djinn.AsyncSession | Blocking


class Api:
    """The daemon at an address, through one of the clients."""

    def __init__(self, address: str, *, blocking: bool) -> None:
        self.address = address
        self._blocking = blocking

    async def open(self, model: str = MODEL, **options: Any) -> Session:
        if not self._blocking:
            return await djinn.AsyncSession(model, address=self.address, **options).open()
        return Blocking(await asyncio.to_thread(djinn.Session, model, address=self.address, **options))

    async def attach(self, session: str) -> Session:
        if not self._blocking:
            return await djinn.AsyncSession.attach(session, address=self.address)
        return Blocking(await asyncio.to_thread(djinn.Session.attach, session, address=self.address))

    @asynccontextmanager
    async def session(self, model: str = MODEL, **options: Any) -> AsyncIterator[Session]:
        opened = await self.open(model, **options)
        try:
            yield opened
        finally:
            await opened.close()


OpenSession = Callable[..., AbstractAsyncContextManager[Session]]


@pytest.fixture(scope="session")
def remote_address(daemon: Daemon) -> Iterator[str]:
    """A gateway that takes sessions over TLS, in front of the daemon."""
    with DaemonStarter() as start, RemoteGateway(start.folder(), daemon) as gateway:
        yield gateway.address_for(token_of(daemon, "conformance", user="root"))


@pytest.fixture(scope="session", params=["local", pytest.param("remote", marks=pytest.mark.long)])
def daemon_address(request: pytest.FixtureRequest, daemon: Daemon) -> str:
    """The daemon's socket, or its address for other machines."""
    return daemon.address if request.param == "local" else request.getfixturevalue("remote_address")


@pytest.fixture(params=["blocking", "asyncio"])
def api(request: pytest.FixtureRequest, daemon_address: str) -> Api:
    return Api(daemon_address, blocking=request.param == "blocking")


@pytest.fixture
def session(api: Api) -> OpenSession:
    """`async with session() as s`: a new session of the model, closed afterwards."""
    return api.session


@pytest.fixture(scope="session")
def model(daemon_address: str) -> djinn.ModelInfo:
    """The model as the daemon describes it, loaded."""
    return djinn.load(MODEL, address=daemon_address)
