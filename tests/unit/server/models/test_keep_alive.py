"""Idle models go to sleep, and the next call wakes them: over real sockets, with a scripted engine."""

from __future__ import annotations

import os
import shutil
import signal
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

import djinn_client as djinn
from djinn_client import errors
from djinn_client.protocol import (
    Cancel,
    Done,
    ForkSession,
    Generate,
    Generated,
    GetTokens,
    OpenSession,
    PauseSession,
    Ping,
    ResumeSession,
    Truncate,
    UnloadModel,
)
from djinnctl.restart import restart
from djinnd.server.models import keep_alive
from djinnd.server.models.keep_alive import idle_seconds
from tests.support.scripted_engine.script import Script
from tests.support.served import Wire, is_listening, wait_for
from tests.support.serving import TINY

SOON = 0.15  # seconds of keep_alive
LONG = 3600.0


def model(client, name="djinn-tiny"):
    return next(model for model in client.models() if model.name == name)


def asleep(client, name="djinn-tiny"):
    return model(client, name).state == "asleep"


def woken(daemon):
    return daemon.log.count("model_ready model=djinn-tiny")


@contextmanager
def falling_asleep(daemon, client):
    """The model, which is loaded without keep_alive, begins to fall asleep; its engine is stopped during the block."""
    engine = client.status().devices[0].pid
    os.kill(engine, signal.SIGSTOP)
    try:
        client.load("djinn-tiny", keep_alive_s=SOON)
        wait_for(lambda: "model_falls_asleep" in daemon.log)
        yield
    finally:
        os.kill(engine, signal.SIGCONT)


@pytest.fixture
def checkpoint(folder):
    path = folder / "checkpoint"
    path.mkdir()
    shutil.copy(TINY / "config.json", path)
    return str(path)


# --- when -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("used", "sessions", "in_use", "idle"),
    [(90.0, [], 0, 10.0), (90.0, [(95.0, None)], 0, 5.0), (90.0, [(20.0, "call")], 0, 0.0), (90.0, [], 1, 0.0)],
)
def test_idle_seconds_since_the_last_call(monkeypatch, used, sessions, in_use, idle):
    monkeypatch.setattr(keep_alive.time, "monotonic", lambda: 100.0)
    of_it = SimpleNamespace(used=used, in_use=in_use)
    assert idle_seconds(of_it, [SimpleNamespace(used=at, call=call) for at, call in sessions]) == idle


def test_a_model_without_keep_alive_stays(serve):
    daemon = serve()
    with daemon.client() as client:
        client.load("djinn-tiny")
        assert model(client).state == "ready"
        assert 0 < model(client).idle_s < model(client).idle_s
        assert "model_falls_asleep" not in daemon.log


def test_a_configured_model_goes_to_sleep_and_its_arena_stays(serve, checkpoint):
    models = {"mine": {"path": checkpoint, "keep_alive": "150ms", "preload": True}}
    daemon = serve(Script(pages=1 << 16), models=models)
    with daemon.client() as client:
        wait_for(lambda: asleep(client, "mine"))
        told = model(client, "mine")
        assert (told.kv_bytes, told.blocks_plain, told.weight_bytes, told.idle_s > 0) == (0, 0, 1 << 16, True)
        assert len(daemon.arena()) == 2
        wait_for(lambda: client.status(check=True).integrity == [])
        assert client.load("mine", keep_alive_s=0).state == "ready"
        wait_for(lambda: "pages: kept" in str(model(client, "mine").notes))


def test_running_and_waiting_calls_keep_a_model_awake(serve):
    daemon = serve(gated=True)
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=2))
        daemon.step()
        wire.ask(PauseSession(id=3, session=session))  # during the call
        client.load("djinn-tiny", keep_alive_s=SOON)
        other = wire.ask(OpenSession(id=4, model="djinn-tiny")).session.id
        for number in range(5, 25):  # calls on another session, for longer than the keep_alive
            assert wire.ask(Truncate(id=number, session=other, length=0)) == Done(id=number)
        assert model(client).idle_s == 0.0
        time.sleep(3 * SOON)  # only time can show it
        assert not asleep(client) and "model_falls_asleep" not in daemon.log
        wire.ask(ResumeSession(id=25, session=session))
        daemon.step()
        assert wire.reply().token_ids == [2, 3]
        wait_for(lambda: asleep(client))


def test_keep_alive_of_a_loaded_model_can_be_changed_by_its_only_user(serve):
    daemon = serve()
    with daemon.client() as client:
        client.load("djinn-tiny", keep_alive_s=LONG)
        client.load("djinn-tiny", keep_alive_s=SOON)
        wait_for(lambda: asleep(client))
        client.load("djinn-tiny", keep_alive_s=0)
        assert model(client).state == "ready"
        for bad in (-1.0, float("nan"), 1e12):
            with pytest.raises(errors.InvalidRequest, match="keep_alive_s"):
                client.load("djinn-tiny", keep_alive_s=bad)


# --- sessions of a model that sleeps ----------------------------------------------------------------------------------


def test_sessions_of_a_sleeping_model_stay_and_can_be_used(serve):
    daemon = serve()
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        assert wire.ask(Generate(id=2, session=session, token_ids=[5, 6, 7], max_tokens=2)).token_ids == [1, 2]
        client.load("djinn-tiny", keep_alive_s=SOON)
        wait_for(lambda: asleep(client))
        (info,) = client.sessions()
        assert (info.state, info.tokens, info.pages) == ("idle", 5, 0)
        fork = wire.ask(ForkSession(id=3, session=session)).session.id
        gone = wire.ask(ForkSession(id=4, session=session)).session.id
        client.close_session(gone)
        assert wire.ask(Truncate(id=5, session=session, length=4)) == Done(id=5)
        assert wire.ask(GetTokens(id=6, session=session)).token_ids == [5, 6, 7, 1]
        assert wire.ask(PauseSession(id=7, session=session)).pages == 0
        assert asleep(client) and woken(daemon) == 1
        wait_for(lambda: client.status(check=True).integrity == [])
        wire.send(Generate(id=8, session=fork, max_tokens=2))
        assert wire.reply().token_ids == [3, 1]
        assert woken(daemon) == 2 and "filled" not in daemon.log.split("model_asleep")[1]
        wire.send(Generate(id=9, session=session, max_tokens=2))
        assert wire.ask(Ping(id=10)) == Done(id=10), "it is still paused"
        assert wire.ask(ResumeSession(id=11, session=session)) == Done(id=11)
        assert wire.reply().token_ids == [2, 3]
        assert client.status(check=True).integrity == []


def test_a_call_during_the_transition_to_sleep_wakes_the_model(serve):
    daemon = serve()
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        with falling_asleep(daemon, client):
            wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=2))
            wire.send(OpenSession(id=3, model="djinn-tiny"))
            assert wire.ask(Ping(id=4)) == Done(id=4)
            assert "model_asleep" not in daemon.log
        replies = {}
        while set(replies) < {2, 3}:
            reply = wire.reply()
            if type(reply).__name__ != "Progress":
                assert reply.id not in replies
                replies[reply.id] = reply
        assert replies[2].token_ids == [2, 3]
        assert woken(daemon) == 2
        assert wire.ask(Ping(id=5)) == Done(id=5), "each call had one final reply"


def test_a_call_during_the_transition_to_sleep_can_be_cancelled(serve):
    daemon = serve()
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        with falling_asleep(daemon, client):
            wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=2), Cancel(target=2))
            reply = wire.reply()
            assert (reply.id, getattr(reply, "code", "cancelled")) == (2, "cancelled")
        assert wire.ask(Generate(id=3, session=session, token_ids=[5], max_tokens=2)).token_ids == [2, 3]


def test_unloading_waits_for_the_transition_to_sleep(serve):
    daemon = serve()
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        with falling_asleep(daemon, client):
            wire.send(UnloadModel(id=1, model="djinn-tiny"))
            assert wire.ask(Ping(id=2)) == Done(id=2)
        assert wire.reply() == Done(id=1)
        assert daemon.arena() == [] and model(client).state == "available"


def test_a_death_of_the_engine_during_the_transition_leaves_the_model_asleep(serve):
    daemon = serve()
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        engine = client.status().devices[0].pid
        os.kill(engine, signal.SIGSTOP)
        client.load("djinn-tiny", keep_alive_s=SOON)
        wait_for(lambda: "model_falls_asleep" in daemon.log)
        os.kill(engine, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 1 and client.status().devices[0].state == "ready")
        assert asleep(client) and len(daemon.arena()) == 1
        reply = wire.ask(Generate(id=2, session=session, token_ids=[5], max_tokens=2))
        assert isinstance(reply, Generated) and reply.token_ids == [2, 3]


def test_a_death_of_the_engine_does_not_wake_a_sleeping_model(serve):
    daemon = serve()
    with daemon.client() as client, djinn.Session("djinn-tiny", address=daemon.address) as session:
        assert session.generate([5], max_tokens=1).token_ids == [2]
        client.load("djinn-tiny", keep_alive_s=SOON)
        wait_for(lambda: asleep(client))
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 1 and client.status().devices[0].state == "ready")
        assert asleep(client) and woken(daemon) == 1
        assert session.generate(max_tokens=1).token_ids == [3]


# --- its memory -------------------------------------------------------------------------------------------------------


def test_unloading_a_sleeping_model_frees_its_arena_objects(serve):
    daemon = serve(Script(pages=1 << 16))
    with daemon.client() as client:
        client.load("djinn-tiny", keep_alive_s=SOON)
        wait_for(lambda: asleep(client))
        with djinn.Session("djinn-tiny", address=daemon.address):
            wait_for(lambda: asleep(client))
            with pytest.raises(errors.InvalidRequest, match="1 sessions use djinn-tiny"):
                client.unload("djinn-tiny")
            with pytest.raises(errors.InvalidRequest, match="loaded already: unload it first"):
                client.load("djinn-tiny", kv_bytes=7)
            client.unload("djinn-tiny", force=True)
        assert daemon.arena() == [] and model(client).state == "available"
        client.load("djinn-tiny")
        assert client.status(check=True).integrity == []


def test_a_model_that_cannot_be_woken_for_lack_of_memory_stays_asleep(serve):
    script = Script()
    daemon = serve(script)
    with daemon.client() as client, djinn.Session("djinn-tiny", address=daemon.address) as session:
        client.load("djinn-tiny", keep_alive_s=SOON)
        session.generate([5], max_tokens=1)
        wait_for(lambda: asleep(client))
        script.on_load = {"djinn-tiny": "full"}
        daemon.write_files()
        os.kill(client.status().devices[0].pid, signal.SIGKILL)  # the next engine reads the script
        wait_for(lambda: client.status().devices[0].restarts == 1 and client.status().devices[0].state == "ready")
        with pytest.raises(errors.OutOfMemory, match="no room on the device"):
            session.generate(max_tokens=1)
        assert asleep(client) and "no room on the device" in model(client).error and len(daemon.arena()) == 1
        script.on_load = {}
        daemon.write_files()
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 2 and client.status().devices[0].state == "ready")
        assert session.generate(max_tokens=1).token_ids == [3]
        assert model(client).error == ""


# --- the next daemon --------------------------------------------------------------------------------------------------


def test_a_sleeping_model_sleeps_on_in_the_next_daemon_and_finds_its_pages(serve):
    daemon = serve(Script(pages=1 << 16))
    with daemon.client() as client:
        client.load("djinn-tiny", keep_alive_s=SOON)
        session = djinn.Session("djinn-tiny", address=daemon.address)
        assert session.generate([5], max_tokens=1).token_ids == [2]
        session.detach()
        wait_for(lambda: asleep(client))
        wait_for(lambda: "model_asleep" in daemon.log)
        assert restart(client, warm=True).models == []
    with daemon.client() as client:
        assert asleep(client) and len(daemon.arena()) == 2
        assert client.status(check=True).integrity == []
        session = djinn.Session.attach(session.id, address=daemon.address)
        assert session.generate(max_tokens=1).token_ids == [3]
        wait_for(lambda: "pages: kept" in str(model(client).notes))
        session.close()


def test_a_cold_start_forgets_a_sleeping_model(serve):
    daemon = serve()
    with daemon.client() as client:
        client.load("djinn-tiny", keep_alive_s=SOON)
        wait_for(lambda: "model_asleep" in daemon.log)
    assert daemon.stop() == 0 and not daemon.left_behind()
    daemon.start()
    wait_for(lambda: is_listening(daemon.address))
    with daemon.client() as client:
        assert model(client).state == "available"
