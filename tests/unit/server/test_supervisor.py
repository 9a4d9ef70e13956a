from __future__ import annotations

import os
import signal

import pytest

from djinn_client import DjinnError, OutOfMemory
from djinn_client.protocol import Cancel, Done, Ping, SetBudget
from djinnd.server.supervisor import Crashes
from tests.support.engine import Script
from tests.support.served import Wire, wait_for


def test_the_first_restart_is_at_once_and_the_next_ones_wait_longer():
    crashes = Crashes()
    delays = [crashes.record(at) for at in (0.0, 1.0, 2.0, 3.0)]
    assert delays[0] == 0.0
    assert delays == sorted(delays) and len(set(delays)) == 4
    assert crashes.record(4.0) is None, "five in a minute are too many"


def test_crashes_of_long_ago_do_not_count():
    crashes = Crashes()
    assert [crashes.record(at) for at in (0.0, 61.0, 122.0, 183.0, 244.0, 305.0)] == [0.0] * 6
    crashes = Crashes()
    for at in (0.0, 10.0, 20.0, 30.0):
        assert crashes.record(at) is not None
    assert crashes.record(60.0) is not None, "the first one is a minute old"
    assert crashes.record(61.0) is None


def test_an_engine_that_fails_to_start_is_started_again(serve):
    daemon = serve(Script(on_start={"1": "die", "2": "die"}))
    with daemon.client() as client:
        client.load("djinn-tiny")
        assert client.status().devices[0].restarts == 2
        assert daemon.starts == 3


def test_a_new_budget_moves_blocks_and_holds_for_the_next_engine(serve):
    daemon = serve(memory="1MiB")
    with daemon.client() as client:
        client.load("djinn-tiny")
        changed = client.set_budget(48 << 10)
        assert (changed.budget_bytes, changed.used_bytes, changed.seconds) == (48 << 10, 48 << 10, 0.25)
        (model,) = changed.models
        assert (model.name, model.state, model.blocks_plain, model.blocks_streamed) == ("djinn-tiny", "ready", 3, 5)
        assert client.load("djinn-tiny").blocks_plain == 3
        assert client.status().devices[0].budget_bytes == 48 << 10
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 1)
        client.load("djinn-tiny")
        assert client.status().devices[0].budget_bytes == 48 << 10
        assert client.status(check=True).integrity == []


def test_a_budget_that_is_refused_changes_nothing(serve):
    daemon = serve(memory="1MiB")
    with daemon.client() as client:
        client.load("djinn-tiny")
        with pytest.raises(OutOfMemory, match="could go down to 24576 bytes") as caught:
            client.set_budget(1)
        assert caught.value.data == {"needed": 24576}
        assert client.status().devices[0].budget_bytes == 1 << 20
        assert client.models()[0].blocks_plain == 8


def test_a_budget_is_remembered_though_the_caller_does_not_wait_for_it(serve):
    daemon = serve(memory="1MiB")
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        engine = client.status().devices[0].pid
        os.kill(engine, signal.SIGSTOP)
        wire.send(SetBudget(id=1, memory_bytes=48 << 10))
        assert wire.ask(Ping(id=2)) == Done(id=2)
        wire.send(Cancel(target=1))
        assert wire.reply().code == "cancelled"
        os.kill(engine, signal.SIGCONT)
        wait_for(lambda: "budget_set" in daemon.log)
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 1)
        client.load("djinn-tiny")
        assert client.status().devices[0].budget_bytes == 48 << 10


def test_an_engine_that_dies_over_a_new_budget(serve):
    """The caller is told to try again; the next engine has the budget that held."""
    daemon = serve(memory="1MiB")
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        engine = client.status().devices[0].pid
        os.kill(engine, signal.SIGSTOP)
        wire.send(SetBudget(id=1, memory_bytes=48 << 10))
        assert wire.ask(Ping(id=2)) == Done(id=2)
        os.kill(engine, signal.SIGKILL)
        assert wire.reply().code == "engine_lost"
        client.load("djinn-tiny")
        assert client.status().devices[0].budget_bytes == 1 << 20


def test_an_engine_that_hangs_in_its_start_is_killed(serve):
    daemon = serve(Script(on_start={"1": "hang"}), limits={"engine_start": "3s"})
    with daemon.client() as client:
        client.load("djinn-tiny")
        assert daemon.starts == 2
    assert "no sign of life" in daemon.log


def test_who_waits_for_an_engine_waits_only_so_long(serve):
    daemon = serve(Script(on_start={"1": "hang"}), limits={"engine_wait": "50ms"})
    with daemon.client() as client:
        with pytest.raises(DjinnError, match=r"0\.05 s now: try again later") as caught:
            client.load("djinn-tiny")
        assert caught.value.code == "engine_lost"
        wait_for(lambda: daemon.starts == 1)
        daemon.kill_newborn()
        wait_for(lambda: client.status().state == "ready")
        client.load("djinn-tiny")


def test_when_engines_crash_too_often_there_is_none_and_calls_say_so_at_once(serve):
    """The daemon stays, for those who want to know."""
    daemon = serve(Script(on_start={str(start): "die" for start in range(2, 9)}))
    with daemon.client() as client:
        client.load("djinn-tiny")

        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: client.status().state == "failed")
        assert daemon.starts == 5
        with pytest.raises(DjinnError, match="5 times in 60 s: see its log, then restart djinnd"):
            client.load("djinn-tiny")
        assert client.status(check=True).integrity == ["the engine did not report: it is failed"]
