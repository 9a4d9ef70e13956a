"""An intervention process as the server sees it, with a child that a test scripts.

The child reads its acts from its command line: one before any message comes, then one for each message.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable

import pytest

from djinn_client.errors import (
    DjinnError,
    FunctionFailed,
    FunctionNotFound,
    InvalidRequest,
    NotPermitted,
    QuotaExceeded,
)
from djinn_client.protocol import AddEdit
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.edits import Captured
from djinn_client.transport.shm import new_window
from djinnd.jobs.sandbox import CallFunctions, LoadFunction
from djinnd.server.whitebox.function_process import FunctionProcess

CHILD = """
import os, socket, sys, time
from djinn_client.protocol import AddEdit, FrameDecoder
from djinnd.jobs.sandbox import *
from djinnd.jobs.sandbox import encode
sock = socket.socket(fileno=int(sys.argv[sys.argv.index("--fd") + 1]))
decoder, come = FrameDecoder(1 << 24), []
def send(*messages):
    sock.sendall(b"".join(map(encode, messages)))
def hear():
    while not come:
        data, fds, _, _ = socket.recv_fds(sock, 1 << 16, 4)
        if not data:
            sys.exit()
        come.extend((decode_to_process(frame.payload), fds[: frame.fds]) for frame in decoder.feed(data))
    return come.pop(0)
def edit(size):
    return FunctionEdit(AddEdit(id=0, session="s", points=["blocks.1"], values=bytes(size), rows=1))
acts = sys.argv[1].split("|")
exec(acts[0])
for act in acts[1:]:
    message, fds = hear()
    exec(act)
hear()
"""
READY, DONE = "send(FunctionsReady())", "send(FunctionsDone())"
KEY = ("s", 1)
RUN = CallFunctions(
    [KEY],
    HitInfo(breakpoint=1, point="blocks.1", block=2, first=0, end=1, prompt_end=1),
    Captured(dtype="float32", first=0, positions=1, room=1, nbytes=64, points=[]),
)
LONG = 60.0


def played(*acts: str, test: Callable[[FunctionProcess], Awaitable[object]]) -> None:
    """Runs a test with a scripted process. Checks that the process is gone in the end, and has reported its end
    once."""

    async def play() -> None:
        ended: list[FunctionProcess] = []
        command = [sys.executable, "-c", CHILD, "|".join(acts)]
        process = FunctionProcess(command, 0, 0, ended.append)
        try:
            await test(process)
        finally:
            await process.end()
        assert process.gone.done() and ended == [process]

    asyncio.run(play())


def load(process: FunctionProcess, seconds: float = LONG) -> Awaitable[object]:
    return process.ask(LoadFunction(KEY, "blocks.1", b"code"), seconds)


async def run(process: FunctionProcess, seconds: float = LONG, room: int = 1 << 20) -> list[AddEdit]:
    window = new_window("hit", 64)
    try:
        return await process.ask(RUN, seconds, window, room)
    finally:
        os.close(window)


async def refused(asked: Awaitable[object], error: type[DjinnError], words: str) -> None:
    with pytest.raises(error, match=words):
        await asked


def test_requests_are_answered_one_after_another() -> None:
    async def test(process: FunctionProcess) -> None:
        answers = await asyncio.gather(load(process), run(process), run(process))
        assert [len(answer or ()) for answer in answers] == [0, 2, 0]
        await refused(run(process), InvalidRequest, "the replacement is")
        await refused(run(process), FunctionFailed, "^raised: x{3992}$")
        process.functions = {KEY, ("s", 2)}
        process.forget({("s", 2), ("t", 1)})
        assert process.functions == {KEY}
        await run(process)

    played(
        READY,
        f"assert message == LoadFunction(('s', 1), 'blocks.1', b'code'); {DONE}",
        f"assert os.fstat(fds[0]).st_size == 64; send(edit(8), edit(8)); {DONE}",
        DONE,
        "send(FunctionsFailed('invalid_request', 'the replacement is nothing'))",
        "send(FunctionsFailed('function_failed', 'raised: ' + 'x' * 9999))",
        "assert message == ForgetFunctions([('s', 2)])",
        DONE,
        test=test,
    )


@pytest.mark.parametrize(
    ("act", "error", "words"),
    [
        ("sys.exit(3)", FunctionFailed, "has ended its process, with status 3"),
        ("os.abort()", FunctionFailed, "died by SIGABRT"),
        ("os.kill(os.getpid(), 31)", FunctionFailed, "that functions may not make"),
        ("os.kill(os.getpid(), 9)", FunctionFailed, "out of memory"),
        ("sock.close(); time.sleep(60)", FunctionFailed, "has closed its connection"),
        ("sock.sendall(bytes(64)); time.sleep(60)", FunctionFailed, "garbage: these bytes"),
        ("send(FunctionsReady()); time.sleep(60)", FunctionFailed, "sent the daemon garbage"),
        ("sock.sendall(b'DJ' + bytes([1, 0, 0, 0, 0, 1, 0])); time.sleep(60)", FunctionFailed, "daemon garbage"),
        ("send(edit(1 << 19), edit(1 << 19)); time.sleep(60)", QuotaExceeded, "edit_bytes_per_session"),
    ],
)
def test_runs_that_end_the_process(act: str, error: type[DjinnError], words: str) -> None:
    async def test(process: FunctionProcess) -> None:
        await refused(run(process), error, words)
        await refused(run(process), FunctionNotFound, "has ended")

    played(READY, act, test=test)


def test_a_run_that_takes_too_long_or_is_cancelled_ends_the_process() -> None:
    async def too_long(process: FunctionProcess) -> None:
        await load(process)
        waiting = asyncio.ensure_future(run(process, LONG))
        await refused(load(process, 0.01), FunctionFailed, r"longer than 0.01 s \(functions.seconds\)")
        await refused(waiting, FunctionNotFound, "has ended")

    async def given_up(process: FunctionProcess) -> None:
        await load(process)
        running = asyncio.ensure_future(run(process))
        waiting = asyncio.ensure_future(run(process))
        await asyncio.sleep(0.01)
        running.cancel()
        await refused(waiting, FunctionNotFound, "has ended")
        assert running.cancelled()

    played(READY, DONE, "time.sleep(60)", test=too_long)
    played(READY, DONE, "time.sleep(60)", test=given_up)


def test_a_message_without_a_request_ends_the_process() -> None:
    async def test(process: FunctionProcess) -> None:
        await load(process)
        await asyncio.wait([process.gone])
        await refused(run(process), FunctionNotFound, "has ended")

    played(READY, DONE + "; time.sleep(0.05); " + DONE, test=test)


def test_a_process_that_cannot_be_confined_or_does_not_start() -> None:
    async def unfit(process: FunctionProcess) -> None:
        await refused(load(process), NotPermitted, "lacks Landlock: intervene")

    async def broken(process: FunctionProcess) -> None:
        await refused(load(process), FunctionFailed, "before it was ready")

    played("send(FunctionsReady('Landlock'))", test=unfit)
    played("sys.exit(1)", test=broken)


def test_a_process_that_is_ended_before_it_has_started() -> None:
    async def test(process: FunctionProcess) -> None:
        loading = asyncio.ensure_future(load(process))
        await asyncio.sleep(0)
        process.kill()
        await refused(loading, FunctionNotFound, "was ended")

    played(READY, test=test)


def test_no_such_command() -> None:
    async def play() -> None:
        ended: list[FunctionProcess] = []
        process = FunctionProcess(["/nonexistent/python"], 0, 0, ended.append)
        await refused(load(process), FunctionFailed, "could not be started")
        await process.end()
        assert ended == [process]

    asyncio.run(play())
