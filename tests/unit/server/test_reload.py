"""SIGHUP: which settings apply at once, and what engines, clients and systemd are told."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client.protocol import GetQuotas, GetStatus, OpenSession
from tests.support.other_user import NOBODY, as_user, only_root, open_to_all
from tests.support.scripted_engine.script import Script
from tests.support.served import Served, Wire, engines_of, wait_for

MODEL = "djinn-tiny"


def test_quotas_apply_to_the_next_call_and_engines_are_told(serve):
    daemon = serve()
    with djinn.Session(MODEL, address=daemon.address) as session, daemon.client() as client:
        daemon.reload(quotas={"few": {"sessions": 1, "disk_kv": "1MiB", "host_kv": "none"}})
        (use,) = client.quotas()
        assert (use.rule, use.sessions, use.sessions_limit, use.disk_kv_limit) == ("few", 1, 1, 1 << 20)
        assert use.disk_kv == 1 << 20, "the scripted engine reports the limit it was given"
        with pytest.raises(djinn.QuotaExceeded, match=r"quotas\.few\.sessions is 1"):
            djinn.Session(MODEL, address=daemon.address)
        daemon.reload(quotas={})
        assert client.quotas()[0].disk_kv == 0
        with djinn.Session(MODEL, address=daemon.address):
            assert len(session.generate([1], max_tokens=2, ignore_eos=True).token_ids) == 2


def test_a_new_engine_is_told_before_it_gets_the_tenant_s_sessions(serve):
    daemon = serve(quotas={"all": {"disk_kv": "1MiB"}})
    with djinn.Session(MODEL, address=daemon.address), daemon.client() as client:
        assert client.quotas()[0].disk_kv == 1 << 20
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: daemon.starts == 2 and client.models()[0].state == "ready")
        assert client.quotas()[0].disk_kv == 1 << 20


def test_faults_are_logged_with_their_lines_and_change_nothing(serve):
    daemon = serve(quotas={"few": {"sessions": 1}})
    file = daemon.folder / "djinnd.yaml"
    lines = file.read_text().splitlines()
    with djinn.Session(MODEL, address=daemon.address), daemon.client() as client:
        file.write_text("\n".join([*lines, "quota: 1", "admins: [none-of-this-name]"]))
        daemon.signal(signal.SIGHUP)
        wait_for(lambda: daemon.log.count("djinnd_reload_refused") == 2)
        assert f"{file}:{len(lines) + 1}: unknown key quota; did you mean quotas?" in daemon.log
        assert f"{file}:{len(lines) + 2}: admins: there is no user 'none-of-this-name' on this machine" in daemon.log
        assert "djinnd_reloaded" not in daemon.log
        assert client.quotas()[0].sessions_limit == 1
        with pytest.raises(djinn.QuotaExceeded):
            djinn.Session(MODEL, address=daemon.address)


def test_settings_that_wait_for_a_restart_are_named_and_no_others(serve):
    daemon = serve()
    daemon.reload(memory="2GiB", limits={"requests_per_connection": 0x7FFF}, metrics="/nowhere/at/all")
    assert "djinnd_reloaded changed=limits at_restart=memory,metrics" in daemon.log
    with daemon.client() as client:
        assert client.status().devices[0].budget_bytes == 1 << 30
    daemon.reload()
    assert "djinnd_reloaded changed=nothing at_restart=memory,metrics" in daemon.log


def test_limits_apply_to_connected_clients(serve):
    daemon = serve()
    with Wire(daemon.address) as wire, daemon.client() as client:
        client.load(MODEL)
        daemon.reload(limits={"sessions_per_user": 1})
        assert wire.ask(OpenSession(id=1, model=MODEL)).session.model == MODEL
        assert wire.ask(OpenSession(id=2, model=MODEL)).code == "not_permitted"
        daemon.reload(limits={"sessions_per_user": 2})
        assert wire.ask(OpenSession(id=3, model=MODEL)).session.model == MODEL


@only_root
def test_administrators_change_at_once(serve):
    daemon = serve()
    open_to_all(daemon.folder, daemon.address)
    with as_user():
        wire = Wire(daemon.address)
    with wire:
        for admins, code in ([], "not_permitted"), ([NOBODY], None), ([], "not_permitted"):
            daemon.reload(admins=admins)
            for request in (GetStatus(id=1, check=True), GetQuotas(id=2, all=True)):
                assert getattr(wire.ask(request), "code", None) == code
        assert [use.user for use in wire.ask(GetQuotas(id=3)).quotas] == [NOBODY]


def test_systemd_hears_of_a_reload(folder):
    daemon = Served(folder)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(str(folder / "notify"))
        heard.settimeout(30)
        daemon.environ["NOTIFY_SOCKET"] = str(folder / "notify")

        def told():
            """The next message that is no heartbeat."""
            while b"WATCHDOG=1" in (message := heard.recv(4096)):
                pass
            return message.decode().split("\n")

        with daemon:
            assert told() == ["READY=1"]
            (folder / "djinnd.yaml").write_text("nonsense")  # it serves on, whatever the file contains
            daemon.signal(signal.SIGHUP)
            reloading, since = told()
            assert reloading == "RELOADING=1" and int(since.removeprefix("MONOTONIC_USEC=")) > 0
            assert told() == ["READY=1"]
            daemon.signal(signal.SIGTERM)
            assert told() == ["STOPPING=1"]


def test_a_signal_before_it_is_ready_waits(serve):
    daemon = serve(Script(on_start={"1": "hang"}))
    wait_for(lambda: daemon.starts == 1)
    (engine,) = engines_of(daemon.process.pid)
    wait_for(lambda: "State:\tT" in Path(f"/proc/{engine}/status").read_text())
    daemon.signal(signal.SIGHUP)
    with daemon.client() as client:
        client.ping()
    assert "djinnd_reloaded" not in daemon.log
    os.kill(engine, signal.SIGCONT)
    wait_for(lambda: "djinnd_reloaded" in daemon.log)
    assert daemon.log.index("djinnd_ready") < daemon.log.index("djinnd_reloaded")
