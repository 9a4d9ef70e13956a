"""Signals of waiting sessions, and pause and unpause, by both clients."""

from __future__ import annotations

import asyncio
import threading

import pytest

import djinn_client as djinn
from djinn_client.arguments.options import signal_message
from djinn_client.errors import InvalidRequest, OutOfMemory, SessionBusy, SessionNotFound
from djinn_client.protocol import (
    AttachSession,
    CloseSession,
    Done,
    ExplainSession,
    Failure,
    Generate,
    Generated,
    PauseReply,
    PauseSession,
    Piece,
    ResumeSession,
    SessionOpened,
    SetPriority,
    Signal,
    Timings,
    Usage,
    WhyReply,
)
from tests.support.scripted_daemon import Line, ScriptedDaemon, session_info

WAITS = Signal(session="s-1", kind="IO_WAIT")
COMPUTES = Signal(session="s-1", kind="COMPUTE")


def generated(id: int, text: str = "") -> Generated:
    return Generated(id=id, text=text, token_ids=[], finish_reason="length", usage=Usage(), timings=Timings())


def expect_signals(line: Line, *signals: Signal) -> None:
    for signal in signals:
        assert line.expect(Signal) == signal


def expect_close(line: Line) -> None:
    line.send(Done(id=line.expect(CloseSession).id))
    line.expect_hang_up()


def expecting(*signals: Signal):  # type: ignore[no-untyped-def]
    def script(line: Line) -> None:
        line.open_session()
        expect_signals(line, *signals)
        expect_close(line)

    return script


def test_signals_have_no_answer(daemon: ScriptedDaemon) -> None:
    script = expecting(Signal(session="s-1", kind="IO_WAIT", expected_s=8.0), WAITS, COMPUTES)
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        s.signal("IO_WAIT", expected_s=8)
        s.signal("IO_WAIT")
        s.signal("COMPUTE")


def test_io_wait_is_two_signals(daemon: ScriptedDaemon) -> None:
    script = expecting(Signal(session="s-1", kind="IO_WAIT", expected_s=0.5), COMPUTES)
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s, s.io_wait(expected_s=0.5):
        pass


def test_io_wait_sends_the_tool_and_the_expected_time(daemon: ScriptedDaemon) -> None:
    searches = Signal(session="s-1", kind="IO_WAIT", tool="search")
    reads = Signal(session="s-1", kind="IO_WAIT", expected_s=2.0, tool="read")
    with djinn.Session("djinn-tiny", address=daemon.play(expecting(searches, COMPUTES, reads, WAITS))) as s:
        with s.io_wait(tool="search"):
            pass
        s.signal("IO_WAIT", expected_s=2, tool="read")
        s.signal("IO_WAIT", expected_s=None)


def test_prefill_and_decode_are_sent_as_signals(daemon: ScriptedDaemon) -> None:
    script = expecting(Signal(session="s-1", kind="PREFILL"), Signal(session="s-1", kind="DECODE"))
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        s.signal("PREFILL")
        s.signal("DECODE")


def test_io_wait_ends_also_when_the_tool_fails(daemon: ScriptedDaemon) -> None:
    session = djinn.Session("djinn-tiny", address=daemon.play(expecting(WAITS, COMPUTES)))
    with session as s, pytest.raises(ZeroDivisionError), s.io_wait():
        raise ZeroDivisionError


def test_an_exception_inside_io_wait_reaches_the_caller(daemon: ScriptedDaemon) -> None:
    def tool(s: djinn.Session) -> None:
        s.close()
        raise ZeroDivisionError

    session = djinn.Session("djinn-tiny", address=daemon.play(expecting(WAITS)))
    with session as s, pytest.raises(ZeroDivisionError), s.io_wait():
        tool(s)


def test_a_session_that_ends_inside_io_wait_computes_no_more(daemon: ScriptedDaemon) -> None:
    def left(line: Line) -> None:
        line.open_session()
        expect_signals(line, WAITS)
        line.expect_hang_up()

    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s, s.io_wait():
            await s.close()

    address = daemon.play(expecting(WAITS), left, expecting(WAITS))
    with djinn.Session("djinn-tiny", address=address) as s, s.io_wait():
        s.close()
    with djinn.Session("djinn-tiny", address=address) as s, s.io_wait():
        s.detach()
    asyncio.run(main())


def test_asyncio_says_the_same(daemon: ScriptedDaemon) -> None:
    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            await s.signal("IO_WAIT", expected_s=2)
            async with s.io_wait():
                pass
            task = asyncio.create_task(wait_for_ever(s))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with s.io_wait(tool="search"):
                pass
            with pytest.raises(ZeroDivisionError):
                async with s.io_wait(3):
                    raise ZeroDivisionError

    async def wait_for_ever(s: djinn.AsyncSession) -> None:
        async with s.io_wait():
            await asyncio.Event().wait()

    timed = [Signal(session="s-1", kind="IO_WAIT", expected_s=seconds) for seconds in (2.0, 3.0)]
    searches = Signal(session="s-1", kind="IO_WAIT", tool="search")
    signals = (timed[0], WAITS, COMPUTES, WAITS, COMPUTES, searches, COMPUTES, timed[1], COMPUTES)
    address = daemon.play(expecting(*signals))
    asyncio.run(main())


def test_between_two_pieces_of_a_stream(daemon: ScriptedDaemon) -> None:
    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="a"))
        expect_signals(line, WAITS, COMPUTES)
        line.send(Piece(id=request.id, text="b"), generated(request.id, "c"))
        expect_close(line)

    texts = []
    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        for piece in s.stream():
            texts.append(piece.text)
            if piece.text == "a":
                with s.io_wait():
                    pass
    assert texts == ["a", "b", "c"]


def test_not_while_a_call_runs(daemon: ScriptedDaemon) -> None:
    running, refused = threading.Event(), threading.Event()

    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        running.set()
        assert refused.wait(30)
        line.send(generated(request.id))
        expect_close(line)

    with djinn.Session("djinn-tiny", address=daemon.play(script)) as s:
        thread = threading.Thread(target=s.generate)
        thread.start()
        assert running.wait(30)
        with pytest.raises(SessionBusy):
            s.signal("IO_WAIT")
        refused.set()
        thread.join()


@pytest.mark.parametrize(
    ("kind", "expected_s", "wrong"),
    [
        ("IO_WAIT", -1, "expected_s is -1"),
        ("IO_WAIT", float("nan"), "expected_s is nan"),
        ("IO_WAIT", float("inf"), "expected_s is inf"),
        ("IO_WAIT", 86401, "expected_s is 86401"),
        ("IO_WAIT", 10**400, "Signal"),
        ("IO_WAIT", "long", "expected_s is 'long'; it must be a number"),
        ("COMPUTE", 1, "COMPUTE takes no expected_s"),
        ("IOWAIT", 0, "'IOWAIT' is no signal: use IO_WAIT, COMPUTE, PREFILL, DECODE"),
        (None, 0, "kind is None; it must be a text"),
    ],
)
def test_wrong_values_are_not_sent(daemon: ScriptedDaemon, kind: str, expected_s: float, wrong: str) -> None:
    session = djinn.Session("djinn-tiny", address=daemon.play(expecting()))
    with session as s, pytest.raises(InvalidRequest, match=wrong):
        s.signal(kind, expected_s=expected_s)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "tool", "wrong"),
    [
        ("IO_WAIT", "x" * 65, "65 characters: at most 64"),
        ("IO_WAIT", 7, "tool is 7; it must be a text"),
        ("COMPUTE", "search", "COMPUTE takes no tool"),
        ("PREFILL", "search", "PREFILL takes no tool"),
    ],
)
def test_wrong_tools_are_not_sent(daemon: ScriptedDaemon, kind: str, tool: str, wrong: str) -> None:
    session = djinn.Session("djinn-tiny", address=daemon.play(expecting()))
    with session as s, pytest.raises(InvalidRequest, match=wrong):
        s.signal(kind, tool=tool)  # type: ignore[arg-type]


def test_signals_in_lower_case_are_the_same() -> None:
    assert signal_message("s-1", "io_wait", 2.0) == signal_message("s-1", "IO_WAIT", 2.0)


def test_a_day_can_be_expected() -> None:
    assert signal_message("s-1", "IO_WAIT", 86400).expected_s == 86400


def test_a_lost_connection_is_made_anew_first(daemon: ScriptedDaemon) -> None:
    def again(line: Line) -> None:
        line.welcome()
        request = line.expect(AttachSession)
        line.send(SessionOpened(id=request.id, session=session_info()))
        expect_signals(line, WAITS)
        expect_close(line)

    def lost(line: Line) -> None:
        line.open_session()
        line.expect(Generate)

    with djinn.Session("djinn-tiny", address=daemon.play(lost, again)) as s:
        with pytest.raises(djinn.ConnectionLost):
            s.generate()
        s.signal("IO_WAIT")


def test_a_session_that_is_closed_here_has_nothing_to_say(daemon: ScriptedDaemon) -> None:
    with djinn.Session("djinn-tiny", address=daemon.play(expecting())) as s:
        s.close()
        for call in (lambda: s.signal("COMPUTE"), s.pause, s.unpause, lambda: s.set_priority("batch"), s.why):
            with pytest.raises(InvalidRequest, match="was closed here"):
                call()


# --- pause and resume -----------------------------------------------------------------------------------------------


def test_pausing_and_resuming_while_a_stream_is_open(daemon: ScriptedDaemon) -> None:
    paused, resumed = threading.Event(), threading.Event()

    def session(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="a"))
        assert paused.wait(30) and resumed.wait(30)
        line.send(generated(request.id, "b"))
        expect_close(line)

    def beside(line: Line) -> None:
        line.welcome()
        match line.receive():
            case PauseSession(id=id, session="s-1", tier=tier):
                line.send(PauseReply(id=id, tier=tier, pages=3, nbytes=12, seconds=0.5))
                paused.set()
            case ResumeSession(id=id, session="s-1"):
                line.send(Done(id=id))
                resumed.set()
        line.expect_hang_up()

    with djinn.Session("djinn-tiny", address=daemon.play(session, beside)) as s:
        stream = s.stream()
        assert next(stream).text == "a"
        reply = s.pause(tier="disk")
        assert (reply.tier, reply.pages, reply.nbytes, reply.seconds) == ("disk", 3, 12, 0.5)
        s.unpause()
        assert [piece.text for piece in stream] == ["b"]


def test_asyncio_pauses_while_a_call_runs(daemon: ScriptedDaemon) -> None:
    resumed = threading.Event()

    def session(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        assert resumed.wait(30)
        line.send(generated(request.id, "whole"))
        expect_close(line)

    def pause(line: Line) -> None:
        line.welcome()
        request = line.expect(PauseSession)
        assert request.tier == "host"
        line.send(PauseReply(id=request.id, tier="host", pages=1, nbytes=2, seconds=0.0))

    def resume(line: Line) -> None:
        line.welcome()
        line.send(Done(id=line.expect(ResumeSession).id))
        resumed.set()

    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            call = asyncio.create_task(s.generate())
            await asyncio.sleep(0)
            assert (await s.pause()).pages == 1
            await s.unpause()
            assert (await call).text == "whole"

    address = daemon.play(session, pause, resume)
    asyncio.run(main())


def test_errors_of_pausing(daemon: ScriptedDaemon) -> None:
    failures = [
        Failure(id=0, code="out_of_memory", message="full", data={"bytes": 7}),
        Failure(id=0, code="session_not_found", message="gone"),
    ]

    def beside(line: Line) -> None:
        line.welcome()
        failure = failures.pop(0)
        failure.id = line.expect(PauseSession).id
        line.send(failure)
        line.expect_hang_up()

    with djinn.Session("djinn-tiny", address=daemon.play(expecting(), beside)) as s:
        with pytest.raises(InvalidRequest, match="tier"):
            s.pause(tier="tape")  # type: ignore[arg-type]
        with pytest.raises(OutOfMemory) as caught:
            s.pause()
        assert caught.value.data == {"bytes": 7}
        with pytest.raises(SessionNotFound):
            s.pause()


# --- class, and why -------------------------------------------------------------------------------------------------

WHY = djinn.Why(state="running", reason="it had a row in the last step", figures={"step": 7})


def test_class_and_why_while_a_stream_is_open(daemon: ScriptedDaemon) -> None:
    changed = threading.Event()

    def session(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="a"))
        assert changed.wait(30)
        line.send(generated(request.id, "b"))
        expect_close(line)

    def beside(line: Line) -> None:
        line.welcome()
        match line.receive():
            case ExplainSession(id=id, session="s-1"):
                line.send(WhyReply(id=id, why=WHY))
            case SetPriority(id=id, session="s-1", priority="batch"):
                line.send(Done(id=id))
                changed.set()
        line.expect_hang_up()

    with djinn.Session("djinn-tiny", address=daemon.play(session, beside)) as s:
        stream = s.stream()
        assert next(stream).text == "a"
        assert s.why() == WHY
        s.set_priority("batch")
        assert [piece.text for piece in stream] == ["b"]


def test_asyncio_changes_the_class_while_a_call_runs(daemon: ScriptedDaemon) -> None:
    asked = threading.Event()

    def session(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        assert asked.wait(30)
        line.send(generated(request.id, "whole"))
        expect_close(line)

    def change(line: Line) -> None:
        line.welcome()
        request = line.expect(SetPriority)
        assert request.priority == "agent"
        line.send(Done(id=request.id))

    def explain(line: Line) -> None:
        line.welcome()
        line.send(WhyReply(id=line.expect(ExplainSession).id, why=WHY))
        asked.set()

    async def main() -> None:
        async with djinn.AsyncSession("djinn-tiny", address=address) as s:
            call = asyncio.create_task(s.generate())
            await asyncio.sleep(0)
            await s.set_priority("agent")
            assert await s.why() == WHY
            assert (await call).text == "whole"

    address = daemon.play(session, change, explain)
    asyncio.run(main())


def test_errors_of_changing_the_class(daemon: ScriptedDaemon) -> None:
    told = Failure(id=0, code="quota_exceeded", message="agent is the highest", data={"quota": "highest_class"})

    def beside(line: Line) -> None:
        line.welcome()
        told.id = line.expect(SetPriority).id
        line.send(told)
        line.expect_hang_up()

    with djinn.Session("djinn-tiny", address=daemon.play(expecting(), beside)) as s:
        with pytest.raises(InvalidRequest, match="priority"):
            s.set_priority("urgent")  # type: ignore[arg-type]
        with pytest.raises(djinn.QuotaExceeded) as caught:
            s.set_priority("interactive")
        assert caught.value.data == {"quota": "highest_class"}
