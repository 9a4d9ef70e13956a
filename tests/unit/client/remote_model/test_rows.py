"""The sessions of a batch's rows are closed behind the block, whatever ends it."""

from __future__ import annotations

import pytest

from djinn_client.errors import Busy
from djinn_client.protocol import (
    CloseSession,
    Done,
    Failure,
    ForkSession,
    Generate,
    Generated,
    OpenSession,
    SessionOpened,
    Timings,
    Usage,
)
from djinn_client.remote_model.rows import Served, fork_each, sessions
from tests.support.scripted_daemon import Line, Script, ScriptedDaemon, session_info


def close(line: Line) -> None:
    line.send(Done(id=line.expect(CloseSession).id))


def served(line: Line) -> None:
    line.open_session()
    close(line)


def refused(line: Line) -> None:
    line.welcome()
    line.send(Failure(id=line.expect(OpenSession).id, code="busy", message="too many requests wait"))
    line.expect_hang_up()


def test_all_are_closed_at_the_end_and_after_an_error(daemon: ScriptedDaemon) -> None:
    address = daemon.play(served)
    with sessions(Served("djinn-tiny", address, ""), 2) as opened:
        assert len(opened) == 2
    with pytest.raises(ZeroDivisionError), sessions(Served("djinn-tiny", address, ""), 2) as opened:
        raise ZeroDivisionError
    assert all(each.ended for each in opened)


def test_an_interrupt_waits_for_no_reply(daemon: ScriptedDaemon) -> None:
    def left(line: Line) -> None:
        line.open_session()
        line.expect_hang_up()

    with pytest.raises(KeyboardInterrupt), sessions(Served("djinn-tiny", daemon.play(left), ""), 2):
        raise KeyboardInterrupt


def test_a_row_that_cannot_be_opened_ends_the_waiting_for_the_others(daemon: ScriptedDaemon) -> None:
    def silent(line: Line) -> None:
        while line.receive() is not None:
            pass

    model = Served("djinn-tiny", daemon.play(refused, silent), "")
    with pytest.raises(Busy, match="too many requests wait"), sessions(model, 2):
        raise AssertionError("a row is missing")


def test_forks_stand_beside_the_session_of_their_prompt(daemon: ScriptedDaemon) -> None:
    def first(line: Line) -> None:
        line.open_session(id="a")
        request = line.expect(Generate)
        assert (request.token_ids, request.max_tokens) == ([1, 2], 0)
        usage, timings = Usage(), Timings()
        line.send(Generated(id=request.id, text="", token_ids=[], finish_reason="length", usage=usage, timings=timings))
        close(line)

    def fork(number: int) -> Script:
        def script(line: Line) -> None:
            line.welcome()
            request = line.expect(ForkSession)
            assert request.session == "a"
            line.send(SessionOpened(id=request.id, session=session_info(id=f"fork-{number}")))
            close(line)

        return script

    with sessions(Served("djinn-tiny", daemon.play(first, fork(1), fork(2)), ""), 1) as opened:
        fork_each(opened, [[1, 2]], 3)
        assert [each.info.id for each in opened] == ["a", "fork-1", "fork-2"]
