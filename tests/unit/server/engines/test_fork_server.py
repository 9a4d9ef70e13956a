"""The server's and the fork server's side: real processes, with few imports."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys

import pytest

from djinnd.server.engines import fork_server as module
from djinnd.server.engines.fork_server import ForkServer
from djinnd.server.handover.succession import Inherited
from tests.support.daemon import is_alive
from tests.support.descriptors import open_descriptors
from tests.support.served import PATIENCE, ROOT

COMMAND = [sys.executable, "-m", "tests.support.fork_server"]


def run(scenario):
    async def within():
        async with asyncio.timeout(PATIENCE):
            await scenario

    asyncio.run(within())


def fork_server(command=COMMAND, given=(), **environ):
    path = os.pathsep.join([*filter(None, [environ.pop("path", "")]), str(ROOT)])
    return ForkServer(command, os.environ | {"PYTHONPATH": path} | environ, given)


async def fork(server, *what, environ=None):
    """Forks a process; returns it, and the test's end of its socket."""
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    try:
        with theirs:
            forked = await server.fork(
                [sys.executable, "-m", "tests.support.forked_child", *map(str, what)], theirs, PATIENCE, environ
            )
    except BaseException:
        ours.close()
        raise
    return forked, ours


async def told(sock):
    text = b""
    while not text.endswith(b"\n"):
        text += await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
    return json.loads(text)


async def parent_of(server):
    """The pid of the fork server, as a child reports it, which then ends."""
    forked, sock = await fork(server, "tell")
    with sock:
        parent = (await told(sock))["parent"]
    assert await forked.wait() == 0
    return parent


def test_a_fork_is_like_a_process_started_by_the_command():
    async def scenario():
        server = fork_server(MARK="1")
        first, first_sock = await fork(server, "tell")
        environ = os.environ | {"PYTHONPATH": str(ROOT), "MARK": "2"}
        second, second_sock = await fork(server, "tell", environ=environ)
        with first_sock, second_sock:
            one, other = await told(first_sock), await told(second_sock)
            assert [one["environ"]["MARK"], other["environ"]["MARK"]] == ["1", "2"]
            for forked, said in ((first, one), (second, other)):
                assert said["pid"] == said["group"] == forked.pid
                assert said["parent"] == said["told parent"] != os.getpid()
                assert (said["threads"], said["blocked"], said["stdin"]) == (1, [], "/dev/null")
                assert (said["name"], said["main"]) == ("__main__", True)
                assert said["modules"] == ["posix_ipc"], "only the fork server's library, and no module of djinnd"
                assert "OPENBLAS_NUM_THREADS" not in said["environ"]
                assert len(said["descriptors"]) == 4, "the three standard descriptors and its socket"
            assert one["random"] != other["random"]
        assert [await first.wait(), await second.wait()] == [0, 0]
        await server.close()
        assert not is_alive(one["parent"])

    run(scenario())


@pytest.mark.parametrize(
    ("what", "status"),
    [
        (("return",), 0),
        (("exit", 0), 0),
        (("exit", 3), 3),
        (("raise",), 1),
        (("kill", 9), -signal.SIGKILL),
        (("kill", 15), -signal.SIGTERM),
    ],
)
def test_the_exit_status_is_as_asyncio_reports_it(what, status):
    async def scenario():
        server = fork_server()
        forked, sock = await fork(server, *what)
        sock.close()
        assert await forked.wait() == status
        assert await forked.wait() == status
        await server.close()

    run(scenario())


def test_births_one_after_another_leave_no_descriptors():
    async def scenario():
        server = fork_server()
        parents = {await parent_of(server)}
        before, theirs = open_descriptors(), len(os.listdir(f"/proc/{next(iter(parents))}/fd"))
        for _ in range(5):
            parents.add(await parent_of(server))
        assert open_descriptors() == before
        (parent,) = parents
        assert len(os.listdir(f"/proc/{parent}/fd")) == theirs == 4
        await server.close()

    before = open_descriptors()
    run(scenario())
    assert open_descriptors() == before


def test_a_killed_fork_server_takes_its_children_along_and_another_is_started_for_the_next():
    async def scenario():
        server = fork_server()
        forked, sock = await fork(server, "tell")
        with sock:
            killed = (await told(sock))["parent"]
            os.kill(killed, signal.SIGKILL)
            assert await forked.wait() == -signal.SIGKILL
        assert await parent_of(server) != killed
        await server.close()
        assert not is_alive(killed) and not os.path.exists(f"/proc/{killed}"), "it must be reaped"

    run(scenario())


def test_a_stopped_fork_server_is_replaced(monkeypatch):
    monkeypatch.setattr(module, "STATUS_S", 0.05)
    monkeypatch.setattr(module, "ANSWER_S", 0.2)

    async def scenario():
        server = fork_server()
        forked, sock = await fork(server, "tell")
        with sock:
            stopped = (await told(sock))["parent"]
            os.kill(stopped, signal.SIGSTOP)
            os.kill(forked.pid, signal.SIGTERM)
            assert await forked.wait() == -signal.SIGKILL, (
                "the process counts as killed without the fork server's report"
            )
        assert await parent_of(server) != stopped
        await server.close()
        assert not is_alive(stopped)

    run(scenario())


def test_a_fork_server_with_other_versions_than_installed_is_replaced(tmp_path, monkeypatch):
    """`pip install --upgrade` does that under a running daemon."""
    monkeypatch.syspath_prepend(tmp_path)

    async def scenario():
        server = fork_server(path=str(tmp_path))
        before = await parent_of(server)
        assert await parent_of(server) == before
        (tmp_path / "torch-99.dist-info").mkdir()
        (tmp_path / "torch-99.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: torch\nVersion: 99\n")
        after = await parent_of(server)
        assert after != before and not is_alive(before)
        assert await parent_of(server) == after
        await server.close()

    run(scenario())


def test_a_fork_server_that_is_handed_over_is_the_same_process():
    async def scenario():
        server = fork_server()
        before = await parent_of(server)
        assert server.is_sound
        given = server.hand_over()
        assert [each.name for each in given] == list(module.FORK_SERVER_FDS)
        successor = fork_server(given=[Inherited(name, fd) for name, fd in given])
        assert await parent_of(successor) == before
        await successor.close()
        assert not is_alive(before)

    run(scenario())


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([], ""),
        (["/no/such/python", "-m", "fork_server"], "No such file"),
        ([sys.executable, "-c", "raise SystemExit(1)"], "died"),
        (
            [
                sys.executable,
                "-c",
                "import threading, time; threading.Thread(target=time.sleep, args=[60], daemon=True).start()\n"
                "from djinnd.engine.fork_server import main; main([])",
            ],
            "has started 1 threads",
        ),
    ],
)
def test_without_a_working_fork_server_the_caller_has_to_start_the_process(command, why, caplog):
    async def scenario():
        server = fork_server(command)
        assert await bear_nothing(server) is None
        assert await bear_nothing(server) is None, "asking again does no harm"
        await server.close()

    before = open_descriptors()
    run(scenario())
    assert open_descriptors() == before
    assert why in caplog.text


async def bear_nothing(server):
    forked, sock = await fork(server, "return")
    sock.close()
    return forked


def test_a_cancelled_fork_leaves_no_fork_server_that_would_answer_later():
    async def scenario():
        server = fork_server([sys.executable, "-c", "import time; time.sleep(60)"])
        waiting = asyncio.create_task(fork(server, "return"))
        await asyncio.sleep(0.05)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert not server.is_sound
        await server.close()

    before = open_descriptors()
    run(scenario())
    assert open_descriptors() == before


def test_a_fork_server_that_imports_for_too_long_is_given_up():
    async def scenario():
        server = fork_server([sys.executable, "-c", "import time; time.sleep(60)"])
        ours, theirs = socket.socketpair()
        with ours, theirs:
            assert (
                await server.fork([sys.executable, "-m", "tests.support.forked_child", "return"], theirs, 0.1) is None
            )

    run(scenario())
