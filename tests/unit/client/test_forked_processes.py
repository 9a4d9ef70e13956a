"""A process that has a session and forks: the child has a copy of all that there is, and must not take part in it."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import traceback
from collections.abc import Callable

import pytest

import djinn_client as djinn
from djinn_client.errors import InvalidRequest
from djinn_client.protocol import (
    AttachSession,
    CloseSession,
    Done,
    Generate,
    Generated,
    Piece,
    Ping,
    SessionOpened,
    Timings,
    Usage,
)
from djinn_client.session.calls import SessionCalls
from djinn_client.transport.steps import run
from tests.support.scripted_daemon import Line, ScriptedDaemon, session_info

PATIENCE_S = 30


def in_child(act: Callable[[], object]) -> None:
    """Forks a process that does this and is gone. Raises AssertionError where it fails or hangs there."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(PATIENCE_S)
        try:
            act()
        except BaseException:
            os.write(2, traceback.format_exc().encode())
            os._exit(1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def expect_generate(line: Line, text: str) -> None:
    request = line.expect(Generate)
    line.send(generated(request.id, text))


def generated(id: int, text: str) -> Generated:
    return Generated(id=id, text=text, token_ids=[], finish_reason="length", usage=Usage(), timings=Timings())


def expect_attach(line: Line) -> None:
    line.welcome()
    line.send(SessionOpened(id=line.expect(AttachSession).id, session=session_info()))


def expect_close(line: Line) -> None:
    line.send(Done(id=line.expect(CloseSession).id))
    line.expect_hang_up()


def parent(line: Line) -> None:
    line.open_session()
    expect_generate(line, "before")
    expect_generate(line, "after")
    expect_close(line)


def test_a_call_there_is_made_over_a_connection_of_its_own(daemon: ScriptedDaemon) -> None:
    def child(line: Line) -> None:
        expect_attach(line)
        expect_generate(line, "child")
        line.expect_hang_up()

    def act() -> None:
        assert s.generate("x").text == "child"

    with djinn.Session("djinn-tiny", address=daemon.play(parent, child)) as s:
        assert s.generate("x").text == "before"
        in_child(act)
        in_child(act)
        assert s.generate("x").text == "after"


def test_its_block_ends_there_without_closing_it(daemon: ScriptedDaemon) -> None:
    def act() -> None:
        s.__exit__(None, None, None)
        s.close()
        with pytest.raises(InvalidRequest, match="was detached here"):
            s.generate("x")

    with djinn.Session("djinn-tiny", address=daemon.play(parent)) as s:
        s.generate("x")
        in_child(act)
        in_child(s.detach)
        assert s.generate("x").text == "after"


@pytest.mark.parametrize("how", ["dropped", "closed", "read", "left with the session"])
def test_a_stream_goes_on_here_whatever_happens_to_it_there(daemon: ScriptedDaemon, how: str) -> None:
    forked = threading.Event()

    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="a"))
        assert forked.wait(PATIENCE_S)
        line.send(Piece(id=request.id, text="b"), generated(request.id, "c"))
        expect_close(line)  # and no Cancel before it

    def act() -> None:
        nonlocal stream
        if how == "dropped":
            del stream
        elif how == "closed":
            stream.close()
        elif how == "read":
            with pytest.raises(
                InvalidRequest, match=rf"begun in process {here}, from which this one \({os.getpid()}\)"
            ):
                next(stream)
        else:
            s.close()

    here = os.getpid()
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        stream = s.stream("x")
        assert next(stream).text == "a"
        in_child(act)
        forked.set()
        assert [piece.text for piece in stream] == ["b", "c"]


def test_a_call_in_which_it_forks_ends_there(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(djinn.Progress(id=request.id, model="djinn-tiny", stage="reading"), generated(request.id, "ab"))
        expect_close(line)

    session = SessionCalls(daemon.play(script))
    run(session.open("djinn-tiny", None, None))
    steps = session.generate("x")
    next(steps)

    def act() -> None:
        with pytest.raises(InvalidRequest, match="begun in process"):
            next(steps)

    in_child(act)
    assert run(steps).text == "ab"
    run(session.close())


def test_a_session_that_is_opened_there_is_closed_there(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        expect_close(line)

    async def main() -> None:
        async with s:
            pass

    s = djinn.AsyncSession("djinn-tiny", address=daemon.play(script))
    in_child(lambda: asyncio.run(main()))


def test_a_client_connects_anew_there(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.welcome()
        line.send(Done(id=line.expect(Ping).id))
        line.expect_hang_up()

    with djinn.Client(daemon.play(script)) as client:
        client.ping()
        in_child(client.ping)
