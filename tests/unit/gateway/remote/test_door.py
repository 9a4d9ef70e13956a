"""A gateway that stops lets the requests of links finish."""

from __future__ import annotations

import threading

import pytest

from djinn_client.errors import ConnectionLost
from djinn_client.protocol import Cancel, Done, Generate, ImportSession, Piece, Ping, Signal, encode
from djinn_client.transport.remote.records import COUNT, Kind
from djinn_client.transport.steps import run
from tests.support.daemon import wait_for
from tests.support.remote_door import PATIENCE_S, RunningDoor
from tests.support.scripted_daemon import Line, ScriptedDaemon

LONG_S = 1000.0  # longer than a test may take


def idle(line: Line) -> None:
    line.welcome()
    while line.receive() is not None:
        pass


def test_idle_links_close_at_once(daemon: ScriptedDaemon, door: RunningDoor) -> None:
    daemon.play(idle)
    connections = [door.client() for _ in range(3)]
    run(connections[0].tell(Signal(session="s", kind="COMPUTE")), PATIENCE_S)  # it has no reply
    door.drain(LONG_S).result(PATIENCE_S)
    for connection in connections:
        wait_for(connection.is_hung_up)
        connection.close()
    with pytest.raises(ConnectionLost, match="no gateway answers"):
        door.client()


def test_a_link_closes_when_its_last_reply_is_final(daemon: ScriptedDaemon, door: RunningDoor) -> None:
    is_draining = threading.Event()
    text = "long" * 100_000

    def script(line: Line) -> None:
        line.welcome()
        request = line.expect(Generate)
        line.send(Piece(id=request.id, text="first"))
        assert is_draining.wait(PATIENCE_S)
        line.expect(Cancel)  # it is no request
        line.send(Piece(id=request.id, text=text), Done(id=request.id))
        line.expect_hang_up()

    daemon.play(script)
    stranger = door.stranger()
    stranger.begin()
    stranger.read(1)
    stranger.say(Generate(id=2, session="s"))
    assert stranger.read(1) == [Piece(id=2, text="first")]
    drained = door.drain(LONG_S)
    stranger.say(Cancel(target=2))
    is_draining.set()
    assert stranger.read() == [Piece(id=2, text=text), Done(id=2)]
    drained.result(PATIENCE_S)
    stranger.close()


def test_an_upload_that_has_begun_is_finished(daemon: ScriptedDaemon, door: RunningDoor) -> None:
    def script(line: Line) -> None:
        line.welcome()
        line.send(Done(id=line.expect(ImportSession).id))
        line.expect_hang_up()

    daemon.play(script)
    stranger = door.stranger()
    stranger.begin()
    stranger.read(1)
    stranger.put(Kind.WINDOW, COUNT.pack(1000))
    wait_for(lambda: door.do(lambda: door.figures.window_bytes))
    drained = door.drain(LONG_S)
    stranger.put(Kind.PART, bytes(1000))
    stranger.put(Kind.FRAMES, encode(ImportSession(id=2, model="m"), 1))
    assert stranger.read() == [Done(id=2)]
    drained.result(PATIENCE_S)
    stranger.close()


def unanswered(line: Line) -> None:
    line.welcome()
    line.expect(Ping)
    line.expect_hang_up()


def test_a_link_with_an_open_request_closes_when_the_time_is_over(daemon: ScriptedDaemon, door: RunningDoor) -> None:
    daemon.play(unanswered)
    connection = door.client()
    run(connection.start(Ping(id=0)), PATIENCE_S)
    door.drain(0.05).result(PATIENCE_S)
    with pytest.raises(ConnectionLost, match="closed the connection before it had answered"):
        run(connection.receive(), PATIENCE_S)


def test_a_second_signal_closes_all_links_at_once(daemon: ScriptedDaemon, door: RunningDoor) -> None:
    daemon.play(unanswered)
    connection = door.client()
    run(connection.start(Ping(id=0)), PATIENCE_S)
    drained = door.drain(LONG_S)
    door.do(door.door.close)
    drained.result(PATIENCE_S)
    with pytest.raises(ConnectionLost):
        run(connection.receive(), PATIENCE_S)


def test_a_link_that_waits_for_its_client_closes_because_none_can_come_back(
    daemon: ScriptedDaemon, door: RunningDoor
) -> None:
    daemon.play(unanswered)
    connection = door.client()
    run(connection.start(Ping(id=0)), PATIENCE_S)
    drained = door.drain(LONG_S)
    connection.close(silently=True)  # as a connection that breaks
    drained.result(PATIENCE_S)
