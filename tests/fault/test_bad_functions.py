"""Faults of functions in the intervention process: at worst their caller gets a typed error.

A bystander streams during every case. The session stays at its hit and continues without the function. At the end the
daemon has in use what it had before the first case, and no process is left.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import os
import resource
import socket
from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle  # noqa: F401  # a user that cannot read this Python's files can import nothing
import pytest
import torch

import djinn_client as djinn
from djinn_client.errors import DjinnError, FunctionFailed, InvalidRequest, NotPermitted
from djinn_client.protocol import AddEdit
from djinnd.jobs.sandbox import FunctionEdit, encode
from tests.conftest import MODEL, DaemonStarter
from tests.support.bystander import Bystander
from tests.support.confined import confined, intervention_processes
from tests.support.daemon import Daemon, holdings, is_alive, wait_for
from tests.support.other_user import NOBODY, as_user, only_root, open_to_all

pytestmark = confined

PROMPT = [5, 6, 7, 8]
POINT = "blocks.1"
WIDTH = 192  # of djinn-tiny
FUNCTIONS = {"users": [os.geteuid(), NOBODY], "memory": "256MiB", "seconds": "60s"}

Function = Callable[[Any, djinn.InterventionContext], Any]


@pytest.fixture(scope="module")
def target() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        daemon = start({"functions": FUNCTIONS})
        open_to_all(daemon.folder, daemon.address)
        with daemon.client() as client:
            client.load(MODEL, kv_bytes=64 << 20)
        with Bystander(daemon.address), djinn.Session(MODEL, address=daemon.address) as s:
            s.breakpoint(POINT)
            s.run(PROMPT)
        before = holdings(daemon)
        yield daemon
        wait_for(lambda: not intervention_processes(daemon))
        wait_for(lambda: holdings(daemon) == before)
        assert before["findings"] == []


@pytest.fixture(scope="module")
def expected(target: Daemon) -> list[int]:
    with djinn.Session(MODEL, address=target.address) as s:
        return s.generate(PROMPT, max_tokens=3, ignore_eos=True).token_ids


@pytest.fixture
def session(target: Daemon) -> Iterator[djinn.Session]:
    """A session, while the daemon serves a bystander."""
    with Bystander(target.address), djinn.Session(MODEL, address=target.address) as s:
        yield s


Fault = tuple[Function, type[DjinnError], str]


def deaths() -> dict[str, Fault]:
    """Functions that end the process. Each is pickled by value, like a function in a notebook."""

    def fork(activation: Any, context: Any) -> None:
        os.fork()

    def connect(activation: Any, context: Any) -> None:
        socket.socket(socket.AF_UNIX)

    def read_another(activation: Any, context: Any) -> None:
        """Reads the server's memory by process_vm_readv, on x86-64 and on aarch64."""
        number = {"x86_64": 310, "aarch64": 270}[os.uname().machine]
        ctypes.CDLL(None).syscall(number, os.getppid(), None, 0, None, 0, 0)

    def abort(activation: Any, context: Any) -> None:
        os.abort()

    def talk_nonsense(activation: Any, context: Any) -> None:
        for fd in range(3, 64):
            try:
                os.write(fd, bytes(64))
            except OSError:
                continue

    kernel = "that functions may not make"
    return {
        "fork": (fork, FunctionFailed, kernel),
        "socket": (connect, FunctionFailed, kernel),
        "another's memory": (read_another, FunctionFailed, kernel),
        "abort": (abort, FunctionFailed, "died by SIGABRT"),
        "nonsense": (talk_nonsense, FunctionFailed, "sent the daemon garbage"),
    }


def failures() -> dict[str, Fault]:
    """Functions that fail and leave the process alive."""

    def fail(activation: Any, context: Any) -> None:
        activation.zero_()
        raise ArithmeticError("of the caller's own")

    def leave(activation: Any, context: Any) -> None:
        raise SystemExit("and so?")

    def open_files(activation: Any, context: Any) -> None:
        tried: list[Callable[[], Any]] = [
            lambda: os.open("/etc/passwd", os.O_RDONLY),
            lambda: os.open("/proc/self/mem", os.O_RDWR | os.O_CREAT),
            lambda: os.open(f"/proc/{os.getppid()}/environ", os.O_RDONLY),
            lambda: os.open("/tmp/djinnd-function", os.O_RDWR | os.O_CREAT),
            lambda: os.open("/dev/shm/djinnd-function", os.O_RDWR | os.O_CREAT),
            lambda: os.listdir("/dev/shm"),
            lambda: os.listdir("/"),
            lambda: os.mkdir("/tmp/djinnd-function"),
            lambda: os.unlink("/etc/hostname"),
            lambda: os.chmod(os.getcwd(), 0o777),
            lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0)),
            lambda: os.sched_setaffinity(os.getppid(), {0}),
            lambda: mmap.mmap(-1, 1 << 40),
        ]
        refused = 0
        for each in tried:
            try:
                each()
            except (OSError, ValueError):
                refused += 1
        raise LookupError(f"{refused} of {len(tried)}")

    def allocate(activation: Any, context: Any) -> None:
        held = []
        while True:
            held.append(torch.ones(1 << 22))

    def allocate_bytes(activation: Any, context: Any) -> None:
        held = []
        while True:
            held.append(bytearray(1 << 16))

    def of_another_shape(activation: Any, context: Any) -> Any:
        return activation[:, :1]

    def no_tensor(activation: Any, context: Any) -> Any:
        return "no tensor"

    memory = r"out of memory; it may take 268,435,456 bytes \(functions.memory\)"
    return {
        "exception": (
            fail,
            FunctionFailed,
            r"1 raised: ArithmeticError: of the caller's own \(in fail, line \d+",
        ),
        "exit": (leave, FunctionFailed, "SystemExit: and so"),
        "files": (open_files, FunctionFailed, "LookupError: 13 of 13"),
        "memory": (allocate, FunctionFailed, memory),
        "memory in bytes": (allocate_bytes, FunctionFailed, memory),
        "shape": (of_another_shape, InvalidRequest, r"the replacement is \[1, 1, 192\], and the activation"),
        "type": (no_tensor, InvalidRequest, "the replacement is"),
    }


def go_wrong(session: djinn.Session, fault: Fault, expected: list[int]) -> None:
    function, error, words = fault
    handle = session.intervene(POINT, function)
    with pytest.raises(error, match=words):
        session.generate(PROMPT, max_tokens=3, ignore_eos=True)
    assert session.token_ids() == PROMPT and session.edits() == []
    handle.remove()
    told = session.resume(max_tokens=3, ignore_eos=True)
    assert isinstance(told, djinn.Generated) and told.token_ids == expected
    session.truncate(0)


def test_failures_and_invalid_results_are_reported(session: djinn.Session, target: Daemon, expected: list[int]) -> None:
    """The process lives on, with the tenant's other functions."""
    with djinn.Session(MODEL, address=target.address) as other:
        other.intervene(POINT, lambda activation, context: None)
        there = intervention_processes(target)
        for fault in failures().values():
            go_wrong(session, fault, expected)
        assert intervention_processes(target) == there


def test_a_function_that_makes_a_nan_ends_its_own_call(session: djinn.Session, expected: list[int]) -> None:
    def no_number(activation: Any, context: Any) -> None:
        activation[0, 0, 0] = float("nan")

    handle = session.intervene(POINT, no_number)
    told = session.generate(PROMPT, max_tokens=3, ignore_eos=True)
    assert (told.finish_reason, told.token_ids) == ("not_finite", []) and session.token_ids() == PROMPT
    handle.remove()
    session.unsteer()
    session.truncate(0)
    assert session.generate(PROMPT, max_tokens=3, ignore_eos=True).token_ids == expected


def test_functions_that_end_their_process_are_reported(
    session: djinn.Session, target: Daemon, expected: list[int]
) -> None:
    for fault in deaths().values():
        go_wrong(session, fault, expected)
        assert not intervention_processes(target)


def test_a_function_that_loops_for_ever_is_ended(session: djinn.Session, target: Daemon, expected: list[int]) -> None:
    """A reload changes the limit of the next run."""

    def loop(activation: Any, context: Any) -> None:
        while True:
            pass

    handle = session.intervene(POINT, loop)
    target.reload({"functions": FUNCTIONS | {"seconds": "200ms"}})
    with pytest.raises(FunctionFailed, match=r"ran for longer than 0.2 s \(functions.seconds\)"):
        session.generate(PROMPT, max_tokens=3, ignore_eos=True)
    target.reload({"functions": FUNCTIONS})
    wait_for(lambda: not intervention_processes(target))
    handle.remove()
    told = session.resume(max_tokens=3, ignore_eos=True)
    assert isinstance(told, djinn.Generated) and told.token_ids == expected


def test_a_forged_message_changes_only_its_own_session(session: djinn.Session, target: Daemon) -> None:
    with djinn.Session(MODEL, address=target.address) as other:
        wanted = AddEdit(id=0, session=other.id, points=["blocks.0"], op="scale", scale=0.0)
        forged = encode(FunctionEdit(wanted))

        def forge(activation: Any, context: Any) -> None:
            for fd in range(3, 64):
                try:
                    os.write(fd, forged)
                except OSError:
                    continue

        session.intervene(POINT, forge)
        session.generate(PROMPT, max_tokens=1)
        assert (len(session.edits()), other.edits()) == (1, [])


def test_a_cancelled_caller_ends_the_function(target: Daemon, expected: list[int]) -> None:
    """After Ctrl-C or a timeout the process is ended, and the session is still at its hit."""

    def loop(activation: Any, context: Any) -> None:
        while True:
            pass

    async def play() -> None:
        async with djinn.AsyncSession(MODEL, address=target.address) as s:
            handle = await s.intervene(POINT, loop)
            generating = asyncio.create_task(s.generate(PROMPT, max_tokens=3, ignore_eos=True))
            await loops(target, generating)
            generating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await generating
            await asyncio.to_thread(wait_for, lambda: not intervention_processes(target))
            await handle.remove()
            told = await s.resume(max_tokens=3, ignore_eos=True)
            assert isinstance(told, djinn.Generated) and told.token_ids == expected

    with Bystander(target.address):
        asyncio.run(play())


async def loops(daemon: Daemon, generating: asyncio.Task[Any]) -> None:
    """Returns when the function loops: its process has used more CPU time than anything else here needs."""
    (pid,) = intervention_processes(daemon)

    def seconds() -> float:
        with open(f"/proc/{pid}/stat") as stat:
            user, system = stat.read().rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    before = seconds()
    await asyncio.to_thread(wait_for, lambda: seconds() > before + 0.5)
    assert not generating.done()


def test_the_daemon_is_killed_during_a_function(expected: list[int]) -> None:
    """Its processes die with it. The next daemon has the sessions, and receives their functions again."""

    def loop(activation: Any, context: Any) -> None:
        while True:
            pass

    async def play(daemon: Daemon) -> list[int]:
        s = djinn.AsyncSession(MODEL, address=daemon.address)
        await s.open()
        await s.intervene(POINT, loop)
        generating = asyncio.create_task(s.generate(PROMPT, max_tokens=3))
        await loops(daemon, generating)
        processes = intervention_processes(daemon)
        await asyncio.to_thread(daemon.kill)
        with pytest.raises(djinn.ConnectionLost):
            await generating
        await s.detach()
        return processes

    with DaemonStarter() as start:
        daemon = start({"functions": FUNCTIONS})
        kept = djinn.Session(MODEL, address=daemon.address)
        kept.intervene(POINT, lambda activation, context: None)
        processes = asyncio.run(play(daemon))
        wait_for(lambda: not any(map(is_alive, processes)))
        settings = {"socket": daemon.address, "state_dir": str(daemon.folder / "state")}
        successor = start(settings | {"functions": FUNCTIONS})
        with pytest.raises(djinn.ConnectionLost):
            assert kept.token_ids()
        assert kept.generate(PROMPT, max_tokens=3, ignore_eos=True).token_ids == expected
        assert len(intervention_processes(successor)) == 1
        kept.close()


@only_root
def test_a_function_runs_as_its_tenant(target: Daemon) -> None:
    """The tenant is no administrator. An administrator's functions do not run in its sessions."""
    with as_user():
        s = djinn.Session(MODEL, address=target.address)
        s.intervene(POINT, lambda activation, context: None)
    (process,) = intervention_processes(target)
    with open(f"/proc/{process}/status") as status:
        fields = dict(line.split(":\t") for line in status.read().splitlines() if ":\t" in line)
    assert fields["Uid"].split() == fields["Gid"].split() == [str(NOBODY)] * 4
    assert (fields["Groups"].split(), fields["CapEff"], fields["CapPrm"]) == ([], "0" * 16, "0" * 16)
    assert (fields["NoNewPrivs"], fields["Seccomp"], fields["Threads"]) == ("1", "2", "1")
    attached = djinn.Session.attach(s.id, address=target.address)
    with pytest.raises(NotPermitted, match="another user's"):
        attached.intervene(POINT, lambda activation, context: None)
    attached.detach()
    s.close()


@pytest.mark.smoke
def test_functions_are_forbidden_by_default(daemon: Daemon) -> None:
    with djinn.Session(MODEL, address=daemon.address) as s:
        with pytest.raises(NotPermitted, match=f"user {os.geteuid()} is not in functions.users"):
            s.intervene(POINT, lambda activation, context: None)
        assert s.breakpoints() == []
        assert len(s.generate(PROMPT, max_tokens=2, ignore_eos=True).token_ids) == 2
    assert intervention_processes(daemon) == []
