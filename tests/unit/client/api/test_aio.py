"""The asyncio client's own parts: cancellation, abandoned iterators, readiness callbacks. The rest is in
test_session.py."""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
from contextlib import aclosing

import numpy as np
import pytest

import djinn_client as djinn
from djinn_client.errors import ConnectionLost, InvalidRequest, SessionBusy
from djinn_client.protocol import (
    AttachSession,
    Cancel,
    CloseSession,
    Done,
    FinishReason,
    ForkSession,
    Forward,
    Generate,
    Generated,
    GetTokens,
    Hello,
    Logits,
    OpenSession,
    Piece,
    SessionOpened,
    Timings,
    TokenIds,
    Truncate,
    Usage,
)
from tests.support.scripted_daemon import Line, Script, ScriptedDaemon, session_info


def final_of(id: int, text: str = "", reason: FinishReason = "length") -> Generated:
    return Generated(id=id, text=text, token_ids=[], finish_reason=reason, usage=Usage(), timings=Timings())


def expect_generate(line: Line, text: str) -> None:
    request = line.expect(Generate)
    line.send(final_of(request.id, text))


def expect_close(line: Line) -> None:
    request = line.expect(CloseSession)
    line.send(Done(id=request.id))
    line.expect_hang_up()


def expect_cancelled(line: Line, *first: str, running: threading.Event | None = None) -> None:
    """A Generate that is answered with the pieces `first` and then given up."""
    request = line.expect(Generate)
    if running is not None:
        running.set()
    line.send(*(Piece(id=request.id, text=text) for text in first))
    assert line.expect(Cancel).target == request.id
    line.send(Piece(id=request.id, text="late"), final_of(request.id, reason="cancelled"))


def cancelled_then_next(*first: str, running: threading.Event | None = None) -> Script:
    def script(line: Line) -> None:
        line.open_session()
        expect_cancelled(line, *first, running=running)
        expect_generate(line, "next")
        expect_close(line)

    return script


def calls(kind: type) -> dict[str, list[str]]:
    """The public methods with the names of their parameters."""
    found = inspect.getmembers(kind, lambda each: inspect.isfunction(each) or inspect.ismethod(each))
    return {name: list(inspect.signature(call).parameters) for name, call in found if not name.startswith("_")}


def test_both_sessions_have_the_same_calls() -> None:
    assert calls(djinn.AsyncSession) == calls(djinn.Session) | {"open": ["self"]}
    assert djinn.AsyncSession.steer.__doc__ == djinn.Session.steer.__doc__


def test_help_shows_results_and_no_steps() -> None:
    for kind in (djinn.Session, djinn.AsyncSession, djinn.Client, djinn.AsyncClient):
        for _, call in inspect.getmembers(kind, inspect.isfunction):
            assert "Steps" not in str(inspect.signature(call).return_annotation)
    assert inspect.signature(djinn.Session.steer).return_annotation == "Edit"


def test_every_call_of_a_session_can_be_awaited(daemon: ScriptedDaemon) -> None:
    values = np.ones((2, 3), np.float32)

    def script(line: Line) -> None:
        line.open_session()
        expect_generate(line, "whole")
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="a"), Piece(id=request.id, text="b"), final_of(request.id, "c"))
        forward = line.expect(Forward)
        line.send(Logits(id=forward.id, tokens=2, vocab=3, timings=Timings(), inline=values.tobytes()))
        truncate = line.expect(Truncate)
        line.send(Done(id=truncate.id))
        tokens = line.expect(GetTokens)
        line.send(TokenIds(id=tokens.id, token_ids=[7]))
        expect_close(line)

    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            assert (s.id, s.info.model) == ("s-1", "djinn-tiny")
            assert (await s.generate("x")).text == "whole"
            stream = s.stream("x")
            assert [piece.text async for piece in stream] == ["a", "b", "c"]
            assert stream.result.text == "abc"
            np.testing.assert_array_equal(await s.forward([1, 2]), values)
            await s.truncate(1)
            assert await s.token_ids() == [7]
        await s.close()

    address = daemon.play(script)
    asyncio.run(main())


def test_a_session_works_without_async_with(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        expect_generate(line, "text")
        expect_close(line)

    async def main() -> None:
        s = djinn.AsyncSession("djinn-tiny", address=address)
        with pytest.raises(InvalidRequest, match="not open yet"):
            await s.generate("x")
        assert await s.open() is s
        await s.open()  # again does nothing
        assert (await s.generate("x")).text == "text"
        await s.close()

    address = daemon.play(script)
    asyncio.run(main())


def test_a_cancelled_task_cancels_the_call(daemon: ScriptedDaemon) -> None:
    running = threading.Event()

    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            task = asyncio.create_task(s.generate("x"))
            await asyncio.to_thread(running.wait)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await s.generate("x")).text == "next"

    address = daemon.play(cancelled_then_next(running=running))
    asyncio.run(main())


def test_a_timeout_cancels_the_call(daemon: ScriptedDaemon) -> None:
    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.01):
                    await s.generate("x")
            assert (await s.generate("x")).text == "next"

    address = daemon.play(cancelled_then_next())
    asyncio.run(main())


@pytest.mark.parametrize("how", ["break", "close", "with", "aclosing"])
def test_leaving_a_stream_early(daemon: ScriptedDaemon, how: str) -> None:
    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            if how == "break":
                async for _ in s.stream("x"):
                    break
            elif how == "close":
                stream = s.stream("x")
                await anext(stream)
                stream.close()
            elif how == "with":
                async with s.stream("x") as stream:
                    await anext(stream)
            else:
                async with aclosing(s.stream("x")) as stream:
                    await anext(stream)
            assert (await s.generate("x")).text == "next"

    address = daemon.play(cancelled_then_next("a"))
    asyncio.run(main())


def test_a_second_task_is_told_that_the_session_is_busy(daemon: ScriptedDaemon) -> None:
    running = threading.Event()

    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            task = asyncio.create_task(s.generate("x"))
            await asyncio.to_thread(running.wait)
            for call in (s.generate("y"), s.close(), s.detach()):
                with pytest.raises(SessionBusy):
                    await call
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert (await s.generate("x")).text == "next"

    address = daemon.play(cancelled_then_next(running=running))
    asyncio.run(main())


def test_two_tasks_on_one_stream(daemon: ScriptedDaemon) -> None:
    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            stream = s.stream("x")
            first = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)  # it has begun, and waits
            with pytest.raises(SessionBusy, match="waiting for this stream's next piece"):
                await anext(stream)
            with pytest.raises(SessionBusy, match="waiting for this stream's next piece"):
                stream.close()
            assert (await first).text == "a"
            stream.close()
            assert (await s.generate("x")).text == "next"

    address = daemon.play(cancelled_then_next("a"))
    asyncio.run(main())


def test_cancelling_while_the_model_loads_hangs_up(daemon: ScriptedDaemon) -> None:
    asked = threading.Event()

    def script(line: Line) -> None:
        line.welcome()
        line.expect(OpenSession)
        asked.set()
        assert isinstance(line.receive(), Cancel | None)
        line.expect_hang_up()

    address = daemon.play(script)
    asyncio.run(open_until(asked, address))


def test_cancelling_while_connecting_hangs_up(daemon: ScriptedDaemon) -> None:
    asked = threading.Event()

    def script(line: Line) -> None:
        line.expect(Hello)
        asked.set()
        assert isinstance(line.receive(), Cancel | None)

    address = daemon.play(script)
    asyncio.run(open_until(asked, address))


async def open_until(asked: threading.Event, address: str) -> None:
    """Opens a session, and gives up when the daemon has received the request."""
    opening = asyncio.create_task(djinn.AsyncSession("djinn-tiny", address=address).open())
    await asyncio.to_thread(asked.wait)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening


def test_detach_and_attach(daemon: ScriptedDaemon) -> None:
    def second(line: Line) -> None:
        line.welcome()
        request = line.expect(AttachSession)
        line.send(SessionOpened(id=request.id, session=session_info(tokens=7)))
        expect_close(line)

    async def main() -> None:
        s = await djinn.AsyncSession("djinn-tiny", address=address).open()
        await s.detach()
        async with await djinn.AsyncSession.attach(s.id, address=address) as again:
            assert again.info.tokens == 7

    address = daemon.play(Line.open_session, second)
    asyncio.run(main())


def test_closing_finds_that_the_daemon_has_been_restarted(daemon: ScriptedDaemon) -> None:
    asked = []

    def restarted(line: Line) -> None:
        line.welcome()
        expect_close(line)
        asked.append(line)

    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address):
            pass

    address = daemon.play(Line.open_session, restarted)
    asyncio.run(main())
    daemon.stop()
    assert len(asked) == 1


def test_an_unopened_session_can_be_detached_closed_and_opened_later(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        expect_generate(line, "hi")
        expect_close(line)

    async def main() -> None:
        s = djinn.AsyncSession("djinn-tiny", address=address)
        await s.detach()
        await s.close()
        async with s:
            assert (await s.generate("x")).text == "hi"

    address = daemon.play(script)
    asyncio.run(main())


def test_many_sessions_in_one_loop(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text=request.text or ""), final_of(request.id, "!"))
        expect_close(line)

    async def one(number: int) -> str:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            return "".join([piece.text async for piece in s.stream(str(number))])

    async def main() -> None:
        assert await asyncio.gather(*map(one, range(20))) == [f"{number}!" for number in range(20)]

    address = daemon.play(script)
    asyncio.run(main())


def test_a_session_goes_from_one_loop_to_the_next(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        expect_generate(line, "one")
        expect_generate(line, "two")
        expect_close(line)

    address = daemon.play(script)
    s = djinn.AsyncSession("djinn-tiny", address=address)
    asyncio.run(s.open())  # type: ignore[arg-type]
    assert asyncio.run(s.generate("x")).text == "one"
    assert asyncio.run(s.generate("x")).text == "two"
    asyncio.run(s.close())


def test_the_asyncio_client_works_under_uvloop(daemon: ScriptedDaemon) -> None:
    uvloop = pytest.importorskip("uvloop")

    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            async for _ in s.stream("x"):
                break
            assert (await s.generate("x")).text == "next"

    address = daemon.play(cancelled_then_next("a"))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())


def test_no_daemon() -> None:
    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address="/nowhere/s"):
            pass

    with pytest.raises(ConnectionLost, match="no daemon at /nowhere/s: start it with `djinnd`"):
        asyncio.run(main())


def test_no_callback_and_no_descriptor_is_left(daemon: ScriptedDaemon) -> None:
    async def main() -> None:
        before = set(os.listdir("/proc/self/fd"))
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            async for _ in s.stream("x"):
                break
            await s.generate("x")
            opened = {int(fd) for fd in set(os.listdir("/proc/self/fd")) - before}
            assert opened and not any(map(asyncio.get_running_loop().remove_reader, opened))
        assert len(set(os.listdir("/proc/self/fd")) - before) <= 1  # the script's own end, until it notices

    address = daemon.play(cancelled_then_next("a"))
    asyncio.run(main())


def test_a_fork_is_open_and_closed_by_its_own_block(daemon: ScriptedDaemon) -> None:
    def parent(line: Line) -> None:
        line.open_session()
        expect_close(line)

    def child(line: Line) -> None:
        line.welcome()
        request = line.expect(ForkSession)
        line.send(SessionOpened(id=request.id, session=session_info(id="s-2")))
        expect_generate(line, "hi")
        expect_close(line)

    async def play(address: str) -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s, await s.fork() as t:
            assert (t.id, s.id) == ("s-2", "s-1")
            await t.generate("hi")

    asyncio.run(play(daemon.play(parent, child)))
