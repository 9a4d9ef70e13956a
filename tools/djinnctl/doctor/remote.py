"""Whether a daemon of another machine answers: the connection, the gateway's certificate, the token, the daemon."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing

from djinn_client.arguments.options import build
from djinn_client.errors import CertificateNotTrusted, DjinnError, NotAuthenticated
from djinn_client.protocol import GetStatus, StatusReply, Welcome
from djinn_client.transport.address import ENVIRONMENT
from djinn_client.transport.connection import connect
from djinn_client.transport.remote.hosts import RemoteAddress, remote_address
from djinn_client.transport.steps import run
from djinnctl.doctor.daemon import judge_notes
from djinnctl.doctor.result import Result, fail, ok, warn

PATIENCE_S = 10.0
SEE_LOG = "see the log of its gateway: journalctl -u djinnd-gateway"


def machine_at(address: str | None) -> RemoteAddress | None:
    """The other machine that the address means, as the client reads it; None for this one. Raises InvalidRequest."""
    return remote_address(address or os.environ.get(ENVIRONMENT) or None)


def check(address: str | None, machine: RemoteAddress, token: str | None) -> Iterator[Result]:
    """`address` means the `machine`."""
    try:
        with closing(run(connect(address, token), PATIENCE_S)) as connection:
            welcome = connection.welcome
            status = run(connection.call(build(GetStatus), StatusReply), PATIENCE_S).message
    except (DjinnError, TimeoutError) as error:
        yield from judge_failure(machine, error)
    else:
        yield from judge_answer(machine, welcome, status)


def judge_failure(machine: RemoteAddress, error: DjinnError | TimeoutError) -> Iterator[Result]:
    """Results up to the first failure, which is the last of them."""
    if not isinstance(error, DjinnError):
        yield fail("connection", f"{machine} has not answered for {PATIENCE_S:g} s", f"ping its host, or {SEE_LOG}")
        return
    finding, separator, remedy = error.message.rpartition(": ")
    finding, remedy = (finding, remedy) if separator else (remedy, SEE_LOG)
    if isinstance(error, CertificateNotTrusted):
        yield ok("connection", f"a gateway answers at {machine}")
        yield fail("certificate", finding, remedy)
    elif isinstance(error, NotAuthenticated):
        yield ok("connection", f"a gateway answers at {machine}")
        yield ok("certificate", certified_by(machine))
        yield fail("token", finding, remedy)
    else:
        yield fail("connection", finding, remedy)


def judge_answer(machine: RemoteAddress, welcome: Welcome, status: StatusReply) -> Iterator[Result]:
    yield ok("connection", f"a gateway answers at {machine}")
    yield ok("certificate", certified_by(machine))
    yield ok("token", f"valid: the daemon takes you for {welcome.name}{', an administrator' if welcome.admin else ''}")
    if status.state == "ready":
        yield ok("daemon", f"djinnd {status.version} is ready")
    else:
        yield warn("daemon", f"djinnd {status.version} is {status.state}", "try again in a moment")
    yield from judge_notes(status.notes)


def certified_by(machine: RemoteAddress) -> str:
    if machine.fingerprint:
        return "it is the one that was trusted"
    return f"certified by {machine.ca or 'an authority that this machine trusts'}"
