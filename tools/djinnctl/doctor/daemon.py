"""Whether a daemon answers where this user would look for one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing, suppress

from djinn_client.arguments.options import build
from djinn_client.errors import ConnectionLost, DjinnError, NotAuthenticated
from djinn_client.protocol import GetStatus, StatusReply
from djinn_client.transport.address import candidates
from djinn_client.transport.connection import connect
from djinn_client.transport.steps import run
from djinnctl.doctor.result import Result, fail, ok, warn

PATIENCE_S = 5.0


def check(address: str | None, token: str | None = None) -> Iterator[Result]:
    for path in candidates(address):
        yield examine(path, token)


def check_notes(address: str | None, token: str | None = None) -> Iterator[Result]:
    """The notes of the daemon for its administrators."""
    for path in candidates(address):
        with suppress(DjinnError, TimeoutError), closing(run(connect(path, token), PATIENCE_S)) as connection:
            yield from judge_notes(run(connection.call(build(GetStatus), StatusReply), PATIENCE_S).message.notes)


def judge_notes(notes: list[str]) -> Iterator[Result]:
    for note in notes:
        finding, _, remedy = note.rpartition(": ")
        yield warn("daemon", finding, remedy)


def examine(path: str, token: str | None = None) -> Result:
    try:
        connection = run(connect(path, token), PATIENCE_S)
    except TimeoutError:
        return fail(
            "socket",
            f"{path} takes connections, but nobody answers within {PATIENCE_S:g} s",
            "see its log: journalctl -u djinnd",
        )
    except ConnectionLost as error:
        judge = fail if os.path.exists(path) and not os.access(path, os.W_OK) else warn
        finding = error.data.get("finding", error.message)
        return judge("socket", finding, error.data.get("remedy") or "see its log: journalctl -u djinnd")
    except NotAuthenticated as error:
        return fail(
            "socket", f"{path}: {error.message}", "give another token, or none: you are known by your Unix user"
        )
    except DjinnError as error:
        return fail("socket", f"{path}: {error.message}", "update djinnd and djinn_client to the same version")
    connection.close()
    return ok("socket", f"djinnd {connection.welcome.version} answers at {connection.address}")
