"""A daemon with scripted engines that come from a nursery, during all of the daemon's life."""

from __future__ import annotations

import os
import signal

import pytest

import djinn_client as djinn
from tests.support.engine import Script
from tests.support.served import Served, is_running, wait_for

NURSERY = "tests.support.nursery"


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


def test_a_killed_engine_is_followed_by_another_of_the_same_nursery(serve):
    daemon = serve(nursery=NURSERY)
    works(daemon)
    first = engine(daemon)
    nursery = parent(first)
    assert parent(nursery) == daemon.process.pid
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: "engine_lost" in daemon.log)
    works(daemon)
    assert parent(engine(daemon)) == nursery
    assert "killed by SIGKILL" in daemon.log and daemon.log.count("nursery_started") == 1


def test_a_killed_nursery_takes_the_engine_along_and_both_come_back(serve):
    daemon = serve(nursery=NURSERY)
    with djinn.Session("djinn-tiny", address=daemon.address) as session:
        session.generate([5], max_tokens=2)
        first = engine(daemon)
        nursery = parent(first)
        os.kill(nursery, signal.SIGKILL)
        wait_for(lambda: not is_running(first))
        wait_for(lambda: "engine_lost" in daemon.log)
        assert session.generate(max_tokens=2).token_ids == [1, 2], "it continues where it was"
    works(daemon)
    assert parent(parent(engine(daemon))) == daemon.process.pid
    assert (daemon.log.count("nursery_started"), daemon.log.count("nursery_lost")) == (2, 1)
    assert not os.path.exists(f"/proc/{nursery}"), "it was reaped"


@pytest.mark.parametrize("warm", [True, False])
def test_a_restart_keeps_the_nursery(serve, warm):
    daemon = serve(nursery=NURSERY)
    works(daemon)
    nursery = parent(engine(daemon))
    for _ in range(4):
        restart(daemon, warm)
        works(daemon)
        assert parent(engine(daemon)) == nursery
    assert len(os.listdir(f"/proc/{daemon.process.pid}/fd")) < 32, "descriptors pile up"
    assert len(os.listdir(f"/proc/{nursery}/fd")) == 5, "the three standard ones, its socket, and its engine"
    assert daemon.log.count("nursery_started") == 1 and "nursery_lost" not in daemon.log


def test_a_nursery_that_is_killed_before_a_restart_is_replaced(serve):
    daemon = serve(nursery=NURSERY)
    works(daemon)
    nursery = parent(engine(daemon))
    os.kill(nursery, signal.SIGKILL)
    restart(daemon, warm=True)
    works(daemon)
    assert daemon.log.count("nursery_started") >= 2, "one more if the restart came before it was ready"
    assert not os.path.exists(f"/proc/{nursery}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_nursery_and_its_engines_end_with_the_daemon(folder, number):
    daemon = Served(folder, nursery=NURSERY)
    daemon.start()
    wait_for(lambda: "engine_ready" in daemon.log)
    first = engine(daemon)
    nursery = parent(first)
    daemon.signal(number)
    daemon.process.wait(30)
    wait_for(lambda: not is_running(first) and not is_running(nursery))


def test_engines_are_started_by_their_command_without_a_nursery(serve):
    daemon = serve(nursery="tests.support.no_such_module")
    works(daemon)
    os.kill(engine(daemon), signal.SIGKILL)
    wait_for(lambda: "engine_lost" in daemon.log)
    works(daemon)
    assert parent(engine(daemon)) == daemon.process.pid
    assert daemon.log.count("nursery_lost") >= 2


def test_the_ends_of_engines_that_end_at_once_are_told_apart(serve, folder):
    daemon = serve(Script(on_start={"1": "die", "2": "die"}), nursery=NURSERY)
    works(daemon)
    assert daemon.starts == 3 and "the engine ended with status 1" in daemon.log

    refused = Served(folder, Script(on_start={"every": "refuse"}), nursery=NURSERY)
    refused.start()
    assert refused.process.wait(30) != 0
    assert refused.starts == 1 and "the engine ended with status 3" in refused.log


def test_a_daemon_that_is_stopped_while_its_nursery_still_imports(folder):
    """The daemon does not wait for the nursery's libraries."""
    daemon = Served(folder, nursery="http.server")  # never sends a message
    daemon.start()
    wait_for(lambda: "nursery_started" in daemon.log and os.path.exists(daemon.address))
    daemon.signal(signal.SIGTERM)
    assert daemon.process.wait(30) == 0
    assert daemon.left_behind() == []
