"""AsyncClient has the calls of Client, and as many at once as are wanted."""

from __future__ import annotations

import asyncio
import inspect
import threading

import pytest

import djinn_client as djinn
from djinn_client.admin.daemon_calls import DaemonCalls
from djinn_client.protocol import Cancel, Done, Failure, Generate, ListSessions, Ping, Sessions
from tests.support.scripted_daemon import Line, ScriptedDaemon, session_info


def calls(kind: type) -> dict[str, list[str]]:
    """The public methods with the names of their parameters."""
    found = inspect.getmembers(kind, inspect.isfunction)
    return {name: list(inspect.signature(call).parameters) for name, call in found if not name.startswith("_")}


def test_both_clients_have_every_call() -> None:
    assert calls(djinn.AsyncClient) == calls(DaemonCalls)
    assert calls(djinn.Client) == calls(DaemonCalls) | {"resume_session": ["self", "session"]}
    assert djinn.AsyncClient.load.__doc__ == djinn.Client.load.__doc__ == DaemonCalls.load.__doc__


def test_a_call_is_awaited(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        line.send(Sessions(id=line.expect(ListSessions).id, sessions=[session_info()]))
        line.expect_hang_up()

    async def main(address: str) -> None:
        async with djinn.AsyncClient(address) as client:
            assert await client.sessions() == [session_info()]

    asyncio.run(main(daemon.play(script)))


def test_calls_at_once_have_a_connection_each_and_keep_it(daemon: ScriptedDaemon) -> None:
    together = threading.Barrier(3, timeout=30)
    lines: list[Line] = []

    def script(line: Line) -> None:
        lines.append(line)
        line.welcome()
        while (request := line.receive()) is not None:
            assert isinstance(request, Ping)
            together.wait()  # all three calls have come
            line.send(Done(id=request.id))

    async def main(address: str) -> None:
        async with djinn.AsyncClient(address) as client:
            for _ in range(2):
                await asyncio.gather(*(client.ping() for _ in range(3)))

    asyncio.run(main(daemon.play(script)))
    daemon.stop()
    assert len(lines) == 3


def test_a_cancelled_call_is_given_up_and_its_connection_serves_the_next(daemon: ScriptedDaemon) -> None:
    asked = threading.Event()

    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(Generate)
        asked.set()
        line.expect(Cancel)
        line.send(Failure(id=request.id, code="cancelled", message="given up"))
        line.send(Done(id=line.expect(Ping).id))
        line.expect_hang_up()

    async def main(address: str) -> None:
        async with djinn.AsyncClient(address) as client:
            call = asyncio.create_task(client.generate("llama", "x"))
            await asyncio.to_thread(asked.wait, 30)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            await client.ping()

    asyncio.run(main(daemon.play(script)))
