"""A daemon with scripted engines that come from a fork server, during all of the daemon's life."""

from __future__ import annotations

import os
import signal

import pytest

import djinn_client as djinn
from tests.support.parameters import long_except
from tests.support.scripted_engine.script import Script
from tests.support.served import Served, is_running, wait_for

FORK_SERVER = "tests.support.fork_server"


def engine(daemon):
    return djinn.status(address=daemon.address).devices[0].pid


def parent(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return int(stat.read().rpartition(")")[2].split()[1])


def works(daemon):
    """Checks that a model is ready, a session computes, and the audit finds nothing."""
    with djinn.Session("djinn-tiny", address=daemon.address) as session:
        assert session.generate([5], max_tokens=2).token_ids == [2, 3]
    assert djinn.status(check=True, address=daemon.address).integrity == []


def restart(daemon, warm):
    ready = daemon.log.count("djinnd_ready")
    with daemon.client() as client:
        client.restart(warm=warm)
    wait_for(lambda: daemon.log.count("djinnd_ready") == ready + 1)


def test_a_killed_engine_is_followed_by_another_of_the_same_fork_server(serve):
    daemon = serve(fork_server=FORK_SERVER)
    works(daemon)
    first = engine(daemon)
    fork_server = parent(first)
    assert parent(fork_server) == daemon.process.pid
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: "engine_lost" in daemon.log)
    works(daemon)
    assert parent(engine(daemon)) == fork_server
    assert "killed by SIGKILL" in daemon.log and daemon.log.count("fork_server_started") == 1


def test_a_killed_fork_server_takes_the_engine_along_and_both_come_back(serve):
    daemon = serve(fork_server=FORK_SERVER)
    with djinn.Session("djinn-tiny", address=daemon.address) as session:
        session.generate([5], max_tokens=2)
        first = engine(daemon)
        fork_server = parent(first)
        os.kill(fork_server, signal.SIGKILL)
        wait_for(lambda: not is_running(first))
        wait_for(lambda: "engine_lost" in daemon.log)
        assert session.generate(max_tokens=2).token_ids == [1, 2], "it continues where it was"
    works(daemon)
    assert parent(parent(engine(daemon))) == daemon.process.pid
    assert (daemon.log.count("fork_server_started"), daemon.log.count("fork_server_lost")) == (2, 1)
    assert not os.path.exists(f"/proc/{fork_server}"), "it was reaped"


@pytest.mark.parametrize("warm", long_except((True,), (True, False)))
def test_a_restart_keeps_the_fork_server(serve, warm):
    daemon = serve(fork_server=FORK_SERVER)
    works(daemon)
    fork_server = parent(engine(daemon))
    for _ in range(4):
        restart(daemon, warm)
        works(daemon)
        assert parent(engine(daemon)) == fork_server
    assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < 32, "descriptors pile up"
    assert len(os.listdir(f"/proc/{fork_server}/fd")) == 5, "the three standard ones, its socket, and its engine"
    assert daemon.log.count("fork_server_started") == 1 and "fork_server_lost" not in daemon.log


def test_a_fork_server_that_is_killed_before_a_restart_is_replaced(serve):
    daemon = serve(fork_server=FORK_SERVER)
    works(daemon)
    fork_server = parent(engine(daemon))
    os.kill(fork_server, signal.SIGKILL)
    restart(daemon, warm=True)
    works(daemon)
    assert daemon.log.count("fork_server_started") >= 2, "one more if the restart came before it was ready"
    assert not os.path.exists(f"/proc/{fork_server}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_fork_server_and_its_engines_end_with_the_daemon(folder, number):
    daemon = Served(folder, fork_server=FORK_SERVER)
    daemon.start()
    wait_for(lambda: "engine_ready" in daemon.log)
    first = engine(daemon)
    fork_server = parent(first)
    daemon.signal(number)
    daemon.process.wait(30)
    wait_for(lambda: not is_running(first) and not is_running(fork_server))


def test_engines_are_started_by_their_command_without_a_fork_server(serve):
    daemon = serve(fork_server="tests.support.no_such_module")
    works(daemon)
    os.kill(engine(daemon), signal.SIGKILL)
    wait_for(lambda: "engine_lost" in daemon.log)
    works(daemon)
    assert parent(engine(daemon)) == daemon.process.pid
    assert daemon.log.count("fork_server_lost") >= 2


def test_the_ends_of_engines_that_end_at_once_are_told_apart(serve, folder):
    daemon = serve(Script(on_start={"1": "die", "2": "die"}), fork_server=FORK_SERVER)
    works(daemon)
    assert daemon.starts == 3 and "the engine ended with status 1" in daemon.log

    refused = Served(folder, Script(on_start={"every": "refuse"}), fork_server=FORK_SERVER)
    refused.start()
    assert refused.process.wait(30) != 0
    assert refused.starts == 1 and "the engine ended with status 3" in refused.log


def test_a_daemon_that_is_stopped_while_its_fork_server_still_imports(folder):
    """The daemon does not wait for the fork server's libraries."""
    daemon = Served(folder, fork_server="http.server")  # never sends a message
    daemon.start()
    wait_for(lambda: "fork_server_started" in daemon.log and os.path.exists(daemon.address))
    daemon.signal(signal.SIGTERM)
    assert daemon.process.wait(30) == 0
    assert daemon.left_behind() == []
