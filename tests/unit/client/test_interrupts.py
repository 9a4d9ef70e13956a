"""After an interrupt at any place in a call, the next call's answer is right."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

import djinn_client as djinn
from djinn_client.protocol import (
    AttachSession,
    Cancel,
    CloseSession,
    Done,
    FinishReason,
    Generate,
    Generated,
    OpenSession,
    Piece,
    ServerMessage,
    SessionOpened,
    Timings,
    Usage,
)
from tests.support.scripted_daemon import Line, ScriptedDaemon, session_info

STRIKES = 40
PIECES = 5


class Interrupt(BaseException):
    """Stands for Ctrl-C, which pytest keeps for itself."""


def final_of(id: int, text: str, reason: FinishReason = "length") -> Generated:
    return Generated(id=id, text=text, token_ids=[], finish_reason=reason, usage=Usage(), timings=Timings())


def echo(line: Line) -> None:
    """Every Generate is answered with its prompt: in PIECES pieces, or at once."""
    line.welcome()
    while (request := line.receive()) is not None:
        match request:
            case OpenSession(id=id) | AttachSession(id=id):
                replies: list[ServerMessage] = [SessionOpened(id=id, session=session_info())]
            case CloseSession(id=id):
                replies = [Done(id=id)]
            case Generate(id=id, text=text, stream=stream):
                assert text is not None
                pieces = [Piece(id=id, text=text) for _ in range(PIECES)] if stream else []
                replies = [*pieces, final_of(id, "" if stream else text)]
            case _:
                replies = []
        try:
            line.send(*replies)
        except BrokenPipeError:
            return


@pytest.fixture
def struck(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bool]]:
    """SIGVTALRM raises Interrupt, and grows this list, for one that strikes in a finalizer is swallowed by Python. Its
    clock is this process's time on the CPU, so it strikes at work and not at waits."""

    struck: list[bool] = []

    def strike(number: int, frame: FrameType | None) -> None:
        struck.append(True)
        raise Interrupt

    swallowed: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: swallowed.append(ignored.exc_type))
    before = signal.signal(signal.SIGVTALRM, strike)
    yield struck
    signal.setitimer(signal.ITIMER_VIRTUAL, 0)
    signal.signal(signal.SIGVTALRM, before)
    assert set(swallowed) <= {Interrupt}


def call_until_struck(s: djinn.Session, streaming: bool, struck: list[bool]) -> int:
    """Calls again and again, each answer checked; the number of calls that were complete."""
    complete = 0
    struck.clear()
    signal.setitimer(signal.ITIMER_VIRTUAL, 0.001)
    try:
        while not struck:
            text = f"call {complete}"
            if streaming:
                assert [piece.text for piece in s.stream(text)] == [text] * PIECES
            else:
                assert s.generate(text).text == text
            complete += 1
    except Interrupt:
        pass
    return complete


@pytest.mark.parametrize("streaming", [False, True], ids=["generate", "stream"])
def test_the_call_after_an_interrupt(daemon: ScriptedDaemon, struck: list[bool], streaming: bool) -> None:
    with djinn.Session("djinn-tiny", address=daemon.play(echo)) as s:
        complete = 0
        for strike in range(STRIKES):
            complete += call_until_struck(s, streaming, struck)
            assert s.generate(f"after {strike}").text == f"after {strike}"
    assert complete > 0


CHILD = """
import sys
import djinn_client as djinn

with djinn.Session("djinn-tiny", address=sys.argv[1]) as s:
    try:
        for piece in s.stream("x"):
            print(piece.text)
    except KeyboardInterrupt:
        print(s.generate("y").text)
"""


def test_ctrl_c_in_a_wait_is_one_cancel_on_the_same_connection(daemon: ScriptedDaemon) -> None:
    started: queue.SimpleQueue[int] = queue.SimpleQueue()

    def script(line: Line) -> None:
        line.open_session()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="piece"))
        child = started.get()
        wait_until_asleep(child)
        os.kill(child, signal.SIGINT)
        assert line.expect(Cancel).target == request.id
        line.send(final_of(request.id, "", "cancelled"))
        request = line.expect(Generate)
        line.send(final_of(request.id, "next"))
        closing = line.expect(CloseSession)
        line.send(Done(id=closing.id))

    command = [sys.executable, "-u", "-c", CHILD, daemon.play(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "piece\n"
        started.put(child.pid)
        assert child.stdout.read() == "next\n"
    assert child.returncode == 0


def wait_until_asleep(pid: int) -> None:
    """The process has one thread, so asleep is where it waits for the daemon."""
    while Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "S":
        os.sched_yield()
