from __future__ import annotations

import socket

import pytest

from djinn_client.errors import NotAuthenticated
from djinn_client.protocol import Done, Ping
from djinn_client.transport.remote.records import COUNT, Kind
from djinn_client.transport.steps import run
from tests.support.daemon import wait_for
from tests.support.remote_door import PATIENCE_S, RunningDoor
from tests.support.scripted_daemon import Line, ScriptedDaemon


def idle(line: Line) -> None:
    line.welcome()
    line.expect_hang_up()


def figures(door: RunningDoor) -> dict[str, float]:
    """By the sample's name, with the value of its label."""
    families = door.do(lambda: list(door.figures.collect()))
    return {
        " ".join([sample.name, *sample.labels.values()]): sample.value
        for family in families
        for sample in family.samples
    }


def test_links_are_connected_or_wait_for_their_client(daemon: ScriptedDaemon, door: RunningDoor) -> None:
    daemon.play(idle)
    connections = [door.client() for _ in range(3)]
    connections[0].close(silently=True)  # as a connection that breaks
    connections[1].close()
    wait_for(lambda: figures(door)["djinnd_remote_links waiting"] == 1)
    wait_for(lambda: figures(door)["djinnd_remote_links connected"] == 1)
    connections[2].close()
    door.do(door.door.close)
    found = figures(door)
    assert (found["djinnd_remote_links waiting"], found["djinnd_remote_links connected"]) == (0, 0)


def test_bytes_count_in_each_direction_and_stay_counted(daemon: ScriptedDaemon, door: RunningDoor) -> None:
    def script(line: Line) -> None:
        line.welcome()
        line.send(Done(id=line.expect(Ping).id))
        line.expect_hang_up()

    daemon.play(script)
    connection = door.client()
    before = figures(door)
    run(connection.call(Ping(id=0), Done), PATIENCE_S)
    during = figures(door)
    connection.close()
    wait_for(lambda: figures(door)["djinnd_remote_links connected"] == 0)
    after = figures(door)
    for direction in ("sent", "received"):
        name = f"djinnd_remote_bytes_total {direction}"
        assert 0 < before[name] < during[name] <= after[name]


def test_memory_of_windows_counts_until_they_have_gone(daemon: ScriptedDaemon, door: RunningDoor) -> None:
    daemon.play(idle)
    stranger = door.stranger()
    stranger.begin()
    stranger.read(1)
    stranger.put(Kind.WINDOW, COUNT.pack(1000))
    wait_for(lambda: figures(door)["djinnd_remote_window_bytes"] == 1000)
    stranger.put(Kind.CLOSE)
    wait_for(lambda: figures(door)["djinnd_remote_window_bytes"] == 0)
    stranger.close()


def test_refused_links_count_by_their_reason(daemon: ScriptedDaemon, door: RunningDoor) -> None:
    daemon.play(Line.refuse)
    for _ in range(2):  # by the daemon, and unasked
        with pytest.raises(NotAuthenticated):
            door.client()
    stranger = door.stranger()
    stranger.say(Ping(id=1))  # before there is a link
    wait_for(lambda: figures(door)["djinnd_remote_refused_links_total protocol_error"] == 1)
    stranger.close()
    silent = door.stranger()
    silent.close()
    wait_for(lambda: figures(door)["djinnd_remote_refused_links_total no_hello"] == 1)
    found = figures(door)
    assert found["djinnd_remote_refused_links_total not_authenticated"] == 2
    assert found["djinnd_refused_tokens_total"] == 2
    assert found["djinnd_remote_failed_handshakes_total"] == 0


def test_handshakes_that_fail_are_no_refused_links(daemon: ScriptedDaemon, door: RunningDoor) -> None:
    daemon.play(idle)
    with socket.create_connection(("127.0.0.1", door.port), PATIENCE_S) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
        wait_for(lambda: figures(door)["djinnd_remote_failed_handshakes_total"] == 1)
    assert figures(door)["djinnd_remote_refused_links_total no_hello"] == 0
