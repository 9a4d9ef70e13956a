"""A relay between a client and a scripted daemon: the last words of a link arrive, and its memory is freed."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from djinn_client.errors import NotAuthenticated, ProtocolError, QuotaExceeded
from djinn_client.protocol import ExportSession, Failure, ImportSession, Piece, SessionExported, SessionOpened, Welcome
from djinn_client.transport.exchange import close_all
from djinn_client.transport.remote.records import Kind
from djinn_client.transport.shm import new_window
from djinn_client.transport.steps import run
from djinnd.config import Remote
from djinnd.gateway.remote.relay import LARGE_WINDOW
from tests.support.daemon import wait_for
from tests.support.remote_door import PATIENCE_S, RunningDoor
from tests.support.scripted_daemon import Line, ScriptedDaemon


def idle(line: Line) -> None:
    line.welcome()
    line.expect_hang_up()


def test_a_client_that_breaks_the_rules_gets_all_that_waits_for_it_and_then_the_reason(
    daemon: ScriptedDaemon, door: RunningDoor
) -> None:
    was_read = threading.Event()
    pieces = [Piece(id=2, text=f"{number}" * 1000) for number in range(100)]  # the network takes a part of them

    def script(line: Line) -> None:
        line.welcome()
        for piece in pieces:
            line.send(piece)
        line.await_read()
        was_read.set()
        line.expect_hang_up()

    daemon.play(script)
    stranger = door.stranger()
    stranger.begin()
    assert was_read.wait(PATIENCE_S)
    stranger.put(Kind.RESUME)
    welcome, *read, failure = stranger.read()
    assert isinstance(welcome, Welcome) and read == pieces
    assert isinstance(failure, Failure) and "at a wrong time" in failure.message
    stranger.close()


def test_a_client_gets_all_that_waits_for_it_when_the_daemon_has_hung_up(
    daemon: ScriptedDaemon, door: RunningDoor
) -> None:
    pieces = [Piece(id=2, text=f"{number}" * 1000) for number in range(100)]

    def script(line: Line) -> None:
        line.welcome()
        for piece in pieces:
            line.send(piece)

    daemon.play(script)
    stranger = door.stranger()
    stranger.begin()
    assert stranger.read()[1:] == pieces
    stranger.close()


def test_a_window_beyond_the_limit_is_refused_with_the_limit_while_it_is_sent(
    daemon: ScriptedDaemon, door: RunningDoor
) -> None:
    door.do(lambda: door.door.follow(Remote(window_bytes=1 << 20, window_bytes_per_token=1 << 20)))
    daemon.play(idle)
    connection = door.client()
    window = new_window("large", 64 << 20)
    with pytest.raises(QuotaExceeded, match="67,108,864 bytes; the gateway takes 1,048,576"):
        run(connection.call(ImportSession(id=0, model="m"), SessionOpened, fds=[window]), PATIENCE_S)
    assert connection.closed
    os.close(window)


@pytest.mark.parametrize("nbytes", [LARGE_WINDOW, LARGE_WINDOW - 1])
def test_only_large_windows_are_freed_on_another_thread(
    daemon: ScriptedDaemon, door: RunningDoor, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []
    start = threading.Thread.start

    def noted(thread: threading.Thread) -> None:
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", noted)

    def script(line: Line) -> None:
        line.welcome()
        window = new_window("exported", nbytes)
        line.send_with(exported(line), [window])
        os.close(window)
        line.send(exported(line))
        line.expect_hang_up()

    daemon.play(script)
    connection = door.client()
    for windows in (1, 0):  # the second call acknowledges the window of the first
        delivery = run(connection.call(ExportSession(id=0, session="s"), SessionExported), PATIENCE_S)
        assert len(delivery.fds) == windows
        close_all(delivery.fds)
    wait_for(lambda: "/memfd:exported" not in Path("/proc/self/maps").read_text())
    assert ("djinn-free" in started) == (nbytes >= LARGE_WINDOW)
    connection.close()


def exported(line: Line) -> SessionExported:
    return SessionExported(id=line.expect(ExportSession).id, token_ids=[], fingerprint="")


def test_a_window_that_cannot_be_mapped_ends_the_link_with_the_reason(
    daemon: ScriptedDaemon, door: RunningDoor
) -> None:
    def script(line: Line) -> None:
        line.welcome()
        window = os.memfd_create("unsealed")
        line.send_with(exported(line), [window])
        os.close(window)
        line.expect_hang_up()

    daemon.play(script)
    with pytest.raises(ProtocolError, match=r"cannot be sealed|not sealed"):
        run(door.client().call(ExportSession(id=0, session="s"), SessionExported), PATIENCE_S)


def test_the_daemon_is_not_asked_again_for_a_token_that_it_has_just_refused(
    daemon: ScriptedDaemon, door: RunningDoor
) -> None:
    def never(line: Line) -> None:
        pytest.fail("the daemon was asked again")

    daemon.play(Line.refuse, never)
    for _ in range(3):
        with pytest.raises(NotAuthenticated, match="is not known"):
            door.client()
