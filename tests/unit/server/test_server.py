"""The life of the daemon: start, drain, stop; and what systemd is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from djinn_client import Client, ConnectionLost
from djinn_client.protocol import (
    Done,
    Generate,
    Generated,
    GetStatus,
    GetTokens,
    LoadModel,
    OpenSession,
    Piece,
    Ping,
)
from djinnd.server.server import Server
from tests.support.scripted_engine.script import Script
from tests.support.served import ROOT, Served, Wire, is_listening, is_running, wait_for


def running_generation(daemon, wire, max_tokens, **fields):
    """A session with a Generate that has brought its first token."""
    session = wire.ask(OpenSession(id=1, model="djinn-tiny"))
    while not hasattr(session, "session"):
        session = wire.reply()
    wire.send(Generate(id=2, session=session.session.id, token_ids=[5], max_tokens=max_tokens, stream=True, **fields))
    daemon.step()
    assert isinstance(wire.reply(), Piece)
    return session.session.id


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_idle_daemon_stops_at_once_and_leaves_nothing(serve, number):
    daemon = serve()
    with daemon.client() as client:
        client.load("djinn-tiny")
        daemon.signal(number)
        assert daemon.process.wait(30) == 0
        assert daemon.left_behind() == []
        with pytest.raises(ConnectionLost):
            client.ping()


def test_draining_lets_running_requests_finish_and_refuses_new_ones(serve):
    daemon = serve(gated=True)
    with Wire(daemon.address) as wire:
        session = running_generation(daemon, wire, max_tokens=3)
        daemon.signal(signal.SIGTERM)
        with Wire(daemon.address) as other:
            wait_for(lambda: other.ask(GetStatus(id=1)).state == "draining")
            for request in (OpenSession(id=2, model="djinn-tiny"), LoadModel(id=2, model="djinn-tiny")):
                assert other.ask(request).code == "shutting_down"
            assert other.ask(GetTokens(id=3, session=session)).token_ids == [5, 2]
        daemon.step(2)
        replies = [wire.reply(), wire.reply(), wire.reply()]
        assert isinstance(replies[-1], Generated) and replies[-1].finish_reason == "length"
        assert [token for reply in replies for token in reply.token_ids] == [3, 1]
        assert wire.reply() is None
    assert daemon.process.wait(30) == 0


def test_requests_that_do_not_finish_in_time_are_cancelled(serve):
    daemon = serve(gated=True, limits={"shutdown_grace": "100ms"})
    with Wire(daemon.address) as wire:
        running_generation(daemon, wire, max_tokens=100)
        daemon.signal(signal.SIGTERM)
        reply = wire.reply()
        assert isinstance(reply, Generated) and reply.finish_reason == "cancelled"
    assert daemon.process.wait(30) == 0


def test_a_second_signal_ends_everything_now(serve):
    """Also an engine that does not answer."""
    daemon = serve(Script(on_token={"5": "hang"}), limits={"shutdown_grace": "1h"})
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=100))
        assert wire.ask(Ping(id=3)) == Done(id=3)
        daemon.signal(signal.SIGTERM)
        wait_for(lambda: "djinnd_draining requests=1" in daemon.log)
        daemon.signal(signal.SIGTERM)
        assert daemon.process.wait(30) == 0
        reply = wire.reply()
        assert reply is None or (isinstance(reply, Generated) and reply.finish_reason == "cancelled")


def test_a_daemon_that_is_stopped_while_its_engine_starts(serve):
    daemon = serve(Script(on_start={"1": "hang"}))
    with Wire(daemon.address) as wire:
        wire.send(OpenSession(id=1, model="djinn-tiny"))
        wait_for(lambda: daemon.starts == 1)
        daemon.signal(signal.SIGTERM)
        wait_for(lambda: "draining" in wire.ask(GetStatus(id=2)).state)
        daemon.signal(signal.SIGTERM)
    assert daemon.process.wait(30) == 0


def test_a_refused_device_ends_the_start_with_an_error(folder):
    daemon = Served(folder, Script(on_start={"every": "refuse"}))
    daemon.start()
    assert daemon.process.wait(30) != 0
    assert daemon.starts == 1, "another try would not help"
    assert "StartError: no engine, because the engine ended with status 3" in daemon.log
    assert daemon.left_behind() == []


def test_a_second_daemon_at_the_same_socket_is_refused_and_the_first_goes_on(serve, folder):
    daemon = serve()
    with daemon.client() as client:
        client.ping()
        other = Served(folder, socket=daemon.address)
        other.start()
        assert other.process.wait(30) != 0
        assert f"already (pid {daemon.process.pid})" in other.log
        client.ping()


def test_objects_of_a_killed_daemon_are_adopted_by_the_next(folder):
    daemon = Served(folder).__enter__()
    with daemon.client() as client:
        client.load("djinn-tiny")
        engine = client.status().devices[0].pid
    arena = daemon.arena()
    daemon.process.kill()
    daemon.process.wait()
    assert len(arena) == 1 and daemon.arena() == arena and os.path.exists(daemon.address)
    wait_for(lambda: not is_running(engine))
    daemon.log_path.unlink()
    with daemon, daemon.client() as client:
        wait_for(lambda: "model_ready model=djinn-tiny" in daemon.log)
        assert os.path.exists(f"/dev/shm/{arena[0]}") and daemon.arena() == []
        assert client.status(check=True).integrity == []
        client.unload("djinn-tiny")
        assert not os.path.exists(f"/dev/shm/{arena[0]}"), "this daemon must remove it"


def test_systemd_hears_of_start_and_stop(folder):
    address = str(folder / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.settimeout(30)
        daemon = Served(folder)
        daemon.environ |= {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "300000"}
        with daemon:
            heard = []
            while "READY=1" not in heard or sum("WATCHDOG=1" in words for words in heard) < 4:
                heard.append(listener.recv(1000).decode())
            assert "STATUS=" in heard[0]
            daemon.signal(signal.SIGTERM)
            while "STOPPING=1" not in heard:
                heard.append(listener.recv(1000).decode())


def test_a_socket_from_systemd(folder):
    """Its file belongs to systemd and stays when the daemon ends."""
    path = str(folder / "systemd.sock")
    daemon = Served(folder)
    daemon.script.marks = str(folder / "marks")
    config, script = daemon.write_files()
    code = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX)\n"
        "s.bind(sys.argv[1]); s.listen(); os.dup2(s.fileno(), 3); os.set_inheritable(3, True)\n"
        "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1'}\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'tests.support.served', *sys.argv[2:]])"
    )
    command = [sys.executable, "-c", code, path, str(config), str(script)]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE) as process:
        wait_for(lambda: is_listening(path))
        with Client(path) as client:
            client.load("djinn-tiny")
            status = client.status(check=True)
            assert (status.address, status.integrity) == (path, [])
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
        assert process.returncode == 0
    assert os.path.exists(path)
    assert not os.path.exists(daemon.address)


def test_the_command_checks_its_configuration(tmp_path):
    path = tmp_path / "djinnd.yaml"
    path.write_text("memory: 3GiB\n")
    command = [sys.executable, "-m", "djinnd", "--config", str(path), "--check-config"]
    shown = subprocess.run([*command, "--device", "cpu"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0
    assert f"# {path}:1" in shown.stdout and "device: cpu" in shown.stdout
    path.write_text("memory: 3XB\n")
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 1
    assert f"{path}:1: memory: '3XB' is not a size" in shown.stderr and "Traceback" not in shown.stderr


def test_the_daemon_imports_neither_torch_nor_transformers():
    code = "import sys, json, djinnd.__main__, djinnd.server.server; print(json.dumps(sorted(sys.modules)))"
    modules = json.loads(subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True).stdout)
    assert not {"torch", "transformers", "numpy"} & set(modules)


def test_an_engine_that_is_lost_as_soon_as_it_is_ready_leaves_the_server_ready():
    """The supervisor's tasks may run before the server's, so the server finds the engine lost."""
    told, asked = list[object](), asyncio.Event()
    server: Any = object.__new__(Server)
    server.address = "here"
    server._stopping = SimpleNamespace(asked=asked, reload=asyncio.Event())
    server._supervisor = SimpleNamespace(settled=lambda: asyncio.sleep(0), state="lost", failure="", told=object())
    server._notifier = SimpleNamespace(tell=lambda **state: told.append(state))
    server._gateway = SimpleNamespace(start=lambda: (told.append("gateway"), asked.set()))
    asyncio.run(asyncio.wait_for(server._main_loop(), 10))
    assert told == [{"READY": 1}, "gateway"]
