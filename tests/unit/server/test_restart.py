"""A daemon that restarts, and what its successor finds. The scripted engine asserts that complete weights have the
bytes that an earlier engine wrote."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client import Client
from djinn_client.protocol import Done, Generate, Generated, GetStatus, OpenSession, Piece, Restart
from tests.support.other_user import as_user, only_root, open_to_all
from tests.support.parameters import long_except
from tests.support.scripted_engine.script import Script
from tests.support.served import ROOT, Served, Wire, is_listening, wait_for
from tests.support.serving import TINY


def starts(daemon):
    return daemon.log.count("djinnd_starting")


def restart(daemon, warm=True):
    """Restarts the daemon; returns when the successor's engine is ready."""
    before = starts(daemon)
    wait_for(lambda: daemon.log.count("djinnd_ready") == before)
    with daemon.client() as client:
        client.restart(warm=warm)
    wait_for(lambda: daemon.log.count("djinnd_ready") == before + 1)


def inodes(daemon):
    return [os.stat(f"/dev/shm/{name}").st_ino for name in daemon.arena()]


def test_a_warm_restart_keeps_process_socket_and_blocks_and_loads_the_models_again(serve):
    daemon = serve()
    djinn.load("djinn-tiny", chat_template="{{ messages }}", address=daemon.address)
    before, listener = inodes(daemon), os.stat(daemon.address).st_ino
    with Wire(daemon.address) as wire:
        kept = wire.ask(OpenSession(id=2, model="djinn-tiny")).session.id
        assert wire.ask(Restart(id=1, warm=True)) == Done(id=1)
        assert wire.reply() is None, "the connection must be closed after the reply"
        with daemon.client() as client:  # waits in the queue of the same socket
            wait_for(lambda: client.status().state == "ready")
            told = []
            client.load("djinn-tiny", on_progress=lambda progress: told.append(progress.stage))
            status = client.status(check=True)
            assert (status.pid, status.integrity) == (daemon.process.pid, [])
            (session,) = client.sessions()
            assert (session.id, session.state) == (kept, "detached")
            assert client.tokenizer("djinn-tiny").chat_template == "{{ messages }}"
            client.close_session(kept)
        assert "filled" not in told
    assert (inodes(daemon), os.stat(daemon.address).st_ino) == (before, listener)
    assert (starts(daemon), daemon.log.count("arena_adopted")) == (2, 1)


def test_a_warm_restart_keeps_pages_that_the_engine_has_saved(serve):
    daemon = serve(Script(pages=1 << 16))
    djinn.load("djinn-tiny", address=daemon.address)
    with daemon.client() as client:
        wait_for(lambda: "pages: new" in str(client.models()[0].notes))
    restart(daemon)
    with daemon.client() as client:
        wait_for(lambda: "pages: kept" in str(client.models()[0].notes))
        assert client.status(check=True).integrity == []
    assert daemon.log.count("arena_adopted") == 2


def test_a_second_signal_ends_the_wait_for_pages(serve):
    daemon = serve(Script(on_shutdown="hang"), limits={"shutdown_grace": "1h"})
    with daemon.client() as client:
        client.load("djinn-tiny")
        client.restart(warm=True)
    wait_for(lambda: "djinnd_draining" in daemon.log)
    for _ in range(2):  # stop, and at once
        daemon.signal(signal.SIGTERM)
        wait_for(lambda: "restart_given_up" in daemon.log)
    assert daemon.process.wait(30) == 0
    assert daemon.left_behind() == []


@pytest.mark.parametrize("fork_server", long_except(("",), ("", "tests.support.fork_server")))
@pytest.mark.parametrize("warm", long_except((True,), (False, True)))
def test_a_restart_does_not_wait_for_a_finished_engine(serve, warm, fork_server):
    daemon = serve(
        Script(on_shutdown="linger", pages=1 << 16), limits={"shutdown_grace": "1h"}, fork_server=fork_server
    )
    djinn.load("djinn-tiny", address=daemon.address)
    with daemon.client() as client:
        wait_for(lambda: "pages: new" in str(client.models()[0].notes))
        first = client.status().devices[0].pid
    restart(daemon, warm)
    assert not os.path.exists(f"/proc/{first}"), "it must be killed and reaped before the next one starts"
    with daemon.client() as client:
        client.load("djinn-tiny")
        wait_for(lambda: f"pages: {'kept' if warm else 'new'}" in str(client.models()[0].notes))
        assert client.status(check=True).integrity == []
        wait_for(lambda: client.status().connections == 1)
        daemon.signal(signal.SIGTERM)
        wait_for(lambda: daemon.log.count("djinnd_draining") == 2)
        daemon.signal(signal.SIGTERM)  # the shutdown does not wait for this one


def test_clients_attach_to_sessions_while_the_last_engine_ends(serve, folder):
    """A sleeping process stands for an engine while the kernel frees its memory."""
    daemon = serve()
    with djinn.Session("djinn-tiny", address=daemon.address) as session:
        session.generate([5], max_tokens=2)
        session.detach()
    assert daemon.stop() == 0
    code = (
        "import os, subprocess, sys; from djinnd.server.engines.previous_engine import ENGINE_FD\n"
        "sleeper = subprocess.Popen(['sleep', '3600']); pidfd = os.pidfd_open(sleeper.pid)\n"
        "os.dup2(pidfd, 3); os.set_inheritable(3, True); print(sleeper.pid, flush=True)\n"
        "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1', 'LISTEN_FDNAMES': ENGINE_FD}\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'tests.support.served', *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", code, *map(str, daemon.write_files())]
    with (
        daemon.log_path.open("ab") as log,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=log) as process,
        ExitStack() as stack,
    ):
        stack.callback(process.kill)  # if an assertion fails
        sleeper = int(process.stdout.readline())
        wait_for(lambda: is_listening(daemon.address))
        attached = djinn.Session.attach(session.id, address=daemon.address)
        assert attached.token_ids() == [5, 2, 3]
        assert (djinn.status(address=daemon.address).state, daemon.starts) == ("starting", 1)
        os.kill(sleeper, signal.SIGKILL)
        assert attached.generate(max_tokens=2).token_ids == [1, 2]
        assert "last_engine_gone" in daemon.log and not os.path.exists(f"/proc/{sleeper}")
        attached.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


@pytest.mark.long
def test_a_daemon_that_is_stopped_meanwhile_leaves_no_last_engine(serve):
    daemon = serve(Script(on_shutdown="linger"), limits={"shutdown_grace": "1h"})
    with daemon.client() as client:
        client.load("djinn-tiny")
        client.restart(warm=True)
    daemon.signal(signal.SIGTERM)
    assert daemon.process.wait(60) == 0
    assert daemon.left_behind() == []


def test_a_signal_after_all_is_left_for_a_successor_stops_the_successor(folder):
    daemon = Served(folder)
    code = (
        "import os, pathlib, signal, sys\n"
        "from djinnd.server.loading.models import ModelTable; close = ModelTable.close\n"
        "from tests.support.served import main\n"
        "async def closed(self, **how): await close(self, **how); os.kill(os.getpid(), signal.SIGTERM)\n"
        "ModelTable.close = closed; main(*map(pathlib.Path, sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, *map(str, daemon.write_files())]
    with daemon.log_path.open("ab") as log, subprocess.Popen(command, cwd=ROOT, stderr=log) as daemon.process:
        try:
            wait_for(lambda: is_listening(daemon.address))
            with daemon.client() as client:
                client.load("djinn-tiny")
                client.restart(warm=True)
            assert daemon.process.wait(60) == 0
        finally:
            daemon.process.kill()
    assert daemon.log.count("djinnd_starting") == daemon.log.count("djinnd_stopped") == 2, daemon.log
    assert "arena_adopted" in daemon.log and daemon.left_behind() == []


@pytest.mark.parametrize("warm", [False, True])
def test_a_restart_with_an_invalid_configuration_is_refused_and_the_daemon_goes_on(serve, warm):
    daemon = serve()
    file = daemon.folder / "djinnd.yaml"
    lines = file.read_text().splitlines()
    file.write_text("\n".join([*lines, "quota: 1"]))
    with djinn.Session("djinn-tiny", address=daemon.address) as session, daemon.client() as client:
        with pytest.raises(djinn.InvalidRequest, match=f"{file}:{len(lines) + 1}: unknown key quota"):
            client.restart(warm=warm)
        assert client.status().state == "ready"
        assert len(session.generate([1], max_tokens=2, ignore_eos=True).token_ids) == 2


def test_a_cold_restart_keeps_no_blocks(serve):
    daemon = serve()
    djinn.load("djinn-tiny", address=daemon.address)
    restart(daemon, warm=False)
    with daemon.client() as client:
        assert client.status().models[0].state == "available"
        assert daemon.arena() == []
        client.load("djinn-tiny")
    assert "arena_adopted" not in daemon.log


@pytest.mark.long
def test_several_restarts_one_after_another(serve):
    daemon = serve()
    djinn.load("djinn-tiny", address=daemon.address)
    for _ in range(4):
        restart(daemon)
        djinn.load("djinn-tiny", address=daemon.address)
    with daemon.client() as client:
        wait_for(lambda: client.status().connections == 1)
        status = client.status(check=True)
        assert (status.integrity, status.connections) == ([], 1)
        fds = os.listdir(f"/proc/{daemon.process.pid}/fd")
    assert daemon.log.count("arena_adopted") == 4
    assert len(fds) < 32, "descriptors pile up"


def test_requests_under_way_may_finish_before_a_restart_and_new_ones_are_refused(serve):
    daemon = serve(gated=True)
    with Wire(daemon.address) as wire, Wire(daemon.address) as admin:
        session = wire.ask(OpenSession(id=1, model="djinn-tiny"))
        while not hasattr(session, "session"):
            session = wire.reply()
        wire.send(Generate(id=2, session=session.session.id, token_ids=[5], max_tokens=3, stream=True))
        daemon.step()
        assert isinstance(wire.reply(), Piece)
        assert admin.ask(Restart(id=1, warm=True)) == Done(id=1)
        assert admin.ask(GetStatus(id=2)).state == "draining"
        assert admin.ask(OpenSession(id=3, model="djinn-tiny")).code == "shutting_down"
        assert admin.ask(Restart(id=4)).code == "shutting_down"
        daemon.step(2)
        replies = [wire.reply(), wire.reply(), wire.reply()]
        assert isinstance(replies[-1], Generated) and replies[-1].finish_reason == "length"
    wait_for(lambda: starts(daemon) == 2)


@pytest.mark.parametrize("warm", [False, True])
def test_a_signal_while_it_drains_for_a_restart_makes_it_a_stop(serve, warm):
    daemon = serve(gated=True)
    djinn.load("djinn-tiny", address=daemon.address)
    with Wire(daemon.address) as wire, Wire(daemon.address) as admin:
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5], max_tokens=2, stream=True))
        daemon.step()
        assert isinstance(wire.reply(), Piece)
        assert admin.ask(Restart(id=1, warm=warm)) == Done(id=1)
        daemon.signal(signal.SIGTERM)
        wait_for(lambda: "restart_given_up" in daemon.log)
        daemon.step()
        assert isinstance(wire.reply(), Piece) and isinstance(wire.reply(), Generated)
        assert daemon.process.wait(30) == 0
    assert starts(daemon) == 1
    assert daemon.left_behind() == []


def test_a_signal_between_daemon_and_successor_reaches_the_successor(folder):
    """It is blocked as soon as the daemon no longer handles it. Here it comes just before the exec."""
    daemon = Served(folder)
    code = (
        "import os, signal, sys; sys.argv = sys.argv[1:]\n"
        "import djinnd.server.handover.succession as succession\n"
        "real = succession.succeed\n"
        "def late(given):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    real(given)\n"
        "succession.succeed = late\n"
        "from pathlib import Path\n"
        "from tests.support.served import main\n"
        "main(*map(Path, sys.argv))\n"
    )
    config, script = daemon.write_files()
    with daemon.log_path.open("ab") as log:
        command = [sys.executable, "-c", code, str(config), str(script)]
        daemon.process = subprocess.Popen(command, cwd=ROOT, stderr=log, stdout=log)
    wait_for(lambda: is_listening(daemon.address))
    with ExitStack() as stack:
        stack.callback(daemon.process.kill)  # if an assertion fails
        with daemon.client() as client:
            client.load("djinn-tiny")
            client.restart(warm=True)
        assert daemon.process.wait(30) == 0, daemon.log
    assert starts(daemon) == 2
    assert daemon.left_behind() == []


def test_no_other_thread_takes_a_signal(serve):
    """A thread that has been joined may not quite have ended when the signal comes. The signal would end the
    process."""
    daemon = serve()
    with daemon.client() as client:
        client.load("djinn-tiny")  # starts worker threads
    tasks = {
        int(task.name): (task / "status").read_text() for task in Path(f"/proc/{daemon.process.pid}/task").iterdir()
    }
    names = {pid: re.search(r"^Name:\s*(.*)$", status, re.M)[1] for pid, status in tasks.items()}
    blocked = {pid: int(re.search(r"^SigBlk:\s*(\w+)$", status, re.M)[1], 16) for pid, status in tasks.items()}
    assert len(tasks) > 2, names
    wanted = sum(1 << number - 1 for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    assert [names[pid] for pid, mask in blocked.items() if mask & wanted != wanted] == [names[daemon.process.pid]]


@only_root
def test_only_an_administrator_may_restart(serve, folder):
    daemon = serve()
    open_to_all(daemon.folder, daemon.address)
    with as_user():
        wire = Wire(daemon.address)
    with wire:
        refused = wire.ask(Restart(id=1, warm=True))
    assert (refused.code, refused.message) == ("not_permitted", "only an administrator may restart the daemon")
    assert starts(daemon) == 1


def test_systemd_hears_of_a_restart_and_its_socket_stays(folder):
    """sd_notify(3): RELOADING with the time, then READY, and no STOPPING; LISTEN_FDS as at the first start."""
    path, notify = str(folder / "systemd.sock"), str(folder / "notify")
    daemon = Served(folder)
    config, script = daemon.write_files()
    code = (
        "import os, socket, sys; s = socket.socket(socket.AF_UNIX)\n"
        "s.bind(sys.argv[1]); s.listen(); os.dup2(s.fileno(), 3); os.set_inheritable(3, True)\n"
        "os.environ |= {'LISTEN_PID': str(os.getpid()), 'LISTEN_FDS': '1', 'LISTEN_FDNAMES': 'djinnd.socket'}\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'tests.support.served', *sys.argv[2:]])"
    )
    command = [sys.executable, "-c", code, path, str(config), str(script)]
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(notify)
        listener.settimeout(30)

        def until(word):
            heard = []
            while not any(word in words for words in heard):
                heard.append(listener.recv(1000).decode().splitlines())
            return [word for words in heard for word in words if not word.startswith(("STATUS", "WATCHDOG"))]

        environ = os.environ | {"NOTIFY_SOCKET": notify}
        with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, env=environ) as process, ExitStack() as stack:
            stack.callback(process.kill)  # if an assertion fails
            assert until("READY=1") == ["READY=1"]
            with Client(path) as client:
                client.load("djinn-tiny")
                client.restart(warm=True)
            reloading, time, ready = until("READY=1")
            assert (reloading, ready) == ("RELOADING=1", "READY=1")
            assert int(time.removeprefix("MONOTONIC_USEC=")) > 0
            with Client(path) as client:
                client.load("djinn-tiny")
                assert (client.status().address, client.status(check=True).integrity) == (path, [])
            process.send_signal(signal.SIGTERM)
            assert until("STOPPING=1") == ["STOPPING=1"]
            process.communicate(timeout=30)
            assert process.returncode == 0
    assert os.path.exists(path), "the file belongs to systemd"


# --- models that come back, and models that do not --------------------------------------------------------------------


@pytest.fixture
def checkpoint(folder):
    path = folder / "checkpoint"
    path.mkdir()
    shutil.copy(TINY / "config.json", path)
    return path


def test_a_model_named_by_a_client_comes_back(serve, checkpoint):
    daemon = serve()
    djinn.load(str(checkpoint), address=daemon.address)
    restart(daemon)
    wait_for(lambda: daemon.log.count("model_ready") == 2)
    with daemon.client() as client:
        assert {model.name: model.state for model in client.models()}[str(checkpoint)] == "ready"


def test_weights_of_a_missing_checkpoint_are_removed_and_the_reason_is_logged(serve, checkpoint):
    daemon = serve()
    djinn.load(str(checkpoint), address=daemon.address)
    shutil.rmtree(checkpoint)
    restart(daemon)
    wait_for(lambda: "model_failed" in daemon.log)
    wait_for(lambda: daemon.arena() == [])
    assert "there is no such folder" in daemon.log
    assert djinn.status(check=True, address=daemon.address).integrity == []


def test_weights_of_a_model_that_is_no_longer_configured_are_removed(serve, checkpoint):
    daemon = serve(models={"mine": {"path": str(checkpoint)}})
    djinn.load("mine", address=daemon.address)
    daemon.config["models"] = {}
    daemon.write_files()
    restart(daemon)
    wait_for(lambda: "no model is called 'mine'" in daemon.log)
    wait_for(lambda: daemon.arena() == [])


def test_weights_that_two_engines_died_over_are_removed_with_their_model(serve):
    daemon = serve()
    djinn.load("djinn-tiny", address=daemon.address)
    daemon.script.on_load = {"djinn-tiny": "die"}
    daemon.write_files()
    restart(daemon)
    with daemon.client() as client:
        wait_for(lambda: client.models()[0].state == "set aside")
        wait_for(lambda: client.status().state == "ready" and daemon.arena() == [])
        assert client.status(check=True).integrity == []


# --- keep_host: false ------------------------------------------------------------------------------------------------


def test_weights_that_a_model_does_not_need_on_the_host_are_freed(serve):
    daemon = serve(Script(keep_host=False))
    with daemon.client() as client, djinn.Session("djinn-tiny", address=daemon.address) as session:
        wait_for(lambda: daemon.arena() == [])
        status = client.status(check=True)
        assert (status.integrity, status.arena_bytes) == ([], 0)
        assert session.generate([5], max_tokens=2).token_ids == [2, 3]


def test_without_weights_on_the_host_the_next_engine_reads_the_checkpoint_again(serve):
    """The grant for the new engine and the release for the old one keep their order."""
    daemon = serve(Script(keep_host=False))
    with daemon.client() as client, djinn.Session("djinn-tiny", address=daemon.address) as session:
        session.generate([5], max_tokens=2)
        for number in range(2, 4):
            os.kill(client.status().devices[0].pid, signal.SIGKILL)
            wait_for(lambda: daemon.starts == number)  # noqa: B023  # called at once
            assert session.generate(max_tokens=1)
            wait_for(lambda: daemon.arena() == [])
        assert client.status(check=True).integrity == []
        client.unload("djinn-tiny", force=True)
        assert client.status(check=True).integrity == []


def test_after_a_warm_restart_such_a_model_is_loaded_on_demand(serve):
    daemon = serve(Script(keep_host=False))
    djinn.load("djinn-tiny", address=daemon.address)
    wait_for(lambda: daemon.arena() == [])
    restart(daemon)
    with daemon.client() as client:
        assert client.status().models[0].state == "available"
        client.load("djinn-tiny")
