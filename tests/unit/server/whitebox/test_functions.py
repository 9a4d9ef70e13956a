"""Permissions for functions, and requests that are refused before a process is asked; over real sockets."""

from __future__ import annotations

import array
import grp
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from djinn_client.protocol import AddFunction, CloseSession, Failure, RunFunctions, encode
from djinn_client.protocol.fields.edits import Captured
from djinn_client.transport.shm import new_window
from djinn_client.whitebox.functions import MAX_CODE, PYTHON
from tests.support.other_user import NOBODY, as_user, only_root, open_to_all
from tests.support.served import Served
from tests.support.steered import Steered, serving_story, tenant_of

CAPTURED = Captured(dtype="float32", first=0, positions=1, room=1, nbytes=64, points=[])


@pytest.fixture(scope="module")
def allowing() -> Iterator[Served]:
    with serving_story() as served:
        served.reload(functions={"users": [os.geteuid()]})
        yield served


@pytest.fixture
def allowed(allowing: Served) -> Iterator[Steered]:
    with tenant_of(allowing) as tenant:
        yield tenant


def add(tenant: Steered, breakpoint: int = 1, code: bytes = b"", python: str = PYTHON, session: str = "") -> Failure:
    request = AddFunction(id=20, session=session or tenant.session, breakpoint=breakpoint, code=code, python=python)
    reply = tenant.ask(request)
    assert isinstance(reply, Failure)
    return reply


def run(tenant: Steered, *fds: int, breakpoints: tuple[int, ...] = (1,)) -> Failure:
    request = RunFunctions(id=21, session=tenant.session, breakpoints=list(breakpoints), captured=CAPTURED)
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    tenant.socket.sendmsg([encode(request, len(fds))], rights)
    reply = tenant.reply()
    assert isinstance(reply, Failure)
    return reply


def stop(tenant: Steered) -> None:
    """Stops the session at breakpoint 1."""
    assert tenant.stop_at("blocks.3") == 1
    reply = tenant.call(token_ids=[5, 6, 7])
    assert reply.hit is not None
    os.close(tenant.take_fd())


def test_functions_are_forbidden_by_default(tenant: Steered) -> None:
    stop(tenant)
    for reply in (add(tenant), run(tenant)):
        assert reply.code == "not_permitted"
        assert reply.data == {"setting": "functions.users", "user": os.geteuid()}
        assert f"user {os.geteuid()} is not in functions.users" in reply.message and "local=True" in reply.message


def test_rules_can_be_reloaded_and_know_groups(allowing: Served, allowed: Steered) -> None:
    wrong = {"breakpoint": 9}
    assert add(allowed, **wrong).code == "invalid_request"
    try:
        allowing.reload(functions={"groups": [NOBODY]})
        assert add(allowed, **wrong).code == "not_permitted"
        allowing.reload(functions={"groups": [grp.getgrgid(os.getegid()).gr_name]})
        assert add(allowed, **wrong).code == "invalid_request"
    finally:
        allowing.reload(functions={"users": [os.geteuid()]})


def test_invalid_functions_are_refused(allowed: Steered) -> None:
    stop(allowed)
    for reply, words in (
        (add(allowed, breakpoint=2), "has no breakpoint 2"),
        (add(allowed, breakpoint=-1), "has no breakpoint -1"),
        (add(allowed, python="cpython-27"), f"pickled by cpython-27, and the daemon runs {PYTHON}"),
        (add(allowed, python="x" * 4096), "pickled by xxx"),
        (add(allowed, python="x" * 9999), "`str` of length <= 4096"),
        (add(allowed, code=bytes(MAX_CODE + 1)), "takes 15,728,641 bytes, and the limit is 15,728,640"),
    ):
        assert reply.code == "invalid_request" and words in reply.message and len(reply.message) < 500
    assert add(allowed, session="f" * 16).code == "session_not_found"


def test_invalid_runs_are_refused(allowed: Steered) -> None:
    window = new_window("hit", 64)
    assert "at no hit" in run(allowed, window).message
    stop(allowed)
    for numbers in ((1,), (), (1, 2), (-5,)):
        assert run(allowed, window, breakpoints=numbers).code == "function_not_found"
    os.close(window)
    assert allowed.edits().edits == []


def test_descriptors_that_are_no_window(allowed: Steered, tmp_path: Path) -> None:
    """Only memory reaches a process, and none that could shrink."""
    stop(allowed)
    ours, theirs = os.pipe()
    file = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    loose = os.memfd_create("loose", os.MFD_ALLOW_SEALING)
    window = new_window("hit", 64)
    for fds in ((), (ours,), (file,), (loose,)):
        reply = run(allowed, *fds)
        assert reply.code == "invalid_request" and "the window that came with the hit" in reply.message
    reply = run(allowed, window, window)
    assert (reply.code, reply.message) == ("invalid_request", "2 descriptors came with a request that takes 1")
    for fd in (ours, theirs, file, loose, window):
        os.close(fd)


@only_root
def test_another_user_s_session(allowing: Served, allowed: Steered) -> None:
    """The tenant is an administrator here."""
    open_to_all(allowing.folder, allowing.address)
    with as_user(), Steered(allowing.address) as other:
        assert add(other).code == "not_permitted"
        assert add(other, session=allowed.session).code == "session_not_found"
        assert "another user's" in add(allowed, session=other.session).message
        other.ask(CloseSession(id=98, session=other.session))
