"""`djinnctl doctor`: one list of checks. Each gathers facts at the edge and judges them in a pure function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from djinn_client.errors import InvalidRequest
from djinnctl.doctor import arena, daemon, gpu, memory, remote, software
from djinnctl.doctor.result import Result, fail
from djinnctl.layout import Group, Renderable, Span, line
from djinnctl.render import state

Check = Callable[[], Iterable[Result]]


def checks(address: str | None, token: str | None, fix: bool) -> list[tuple[str, Check]]:
    """The checks in the order in which a person would look. This machine's GPU, memory and arena are left out if the
    daemon is another machine's, or djinnd is not in this Python. Raises InvalidRequest."""
    machine = remote.machine_at(address)
    serves_here = machine is None and software.has_daemon()
    here: list[tuple[str, Check]] = [
        ("Python", software.check_python),
        ("packages", partial(software.check_packages, of_daemon=serves_here)),
    ]
    if machine is not None:
        if fix:
            raise InvalidRequest(
                f"--fix removes shared memory of this machine: run it on the daemon's machine, {machine.host}"
            )
        return [*here, ("connection", partial(remote.check, address, machine, token))]
    socket: list[tuple[str, Check]] = [
        ("socket", partial(daemon.check, address, token)),
        ("daemon", partial(daemon.check_notes, address, token)),
    ]
    if not serves_here:
        return [*here, *socket]
    return [
        *here,
        ("GPU", gpu.check),
        ("memory", memory.check_memory),
        ("memlock", memory.check_memlock),
        ("/dev/shm", memory.check_shm),
        *socket,
        ("arena", partial(arena.check, fix=fix)),
    ]


def examine(*, address: str | None = None, token: str | None = None, fix: bool = False) -> list[Result]:
    """Raises InvalidRequest for an address that is none, and for `fix` with another machine's."""
    return [result for subject, check in checks(address, token, fix) for result in _sheltered(subject, check)]


def _sheltered(subject: str, check: Check) -> Iterator[Result]:
    """A check that breaks is a finding, and no reason to keep the others from the reader."""
    try:
        yield from check()
    except Exception as error:
        yield fail(subject, f"the check broke: {type(error).__name__}: {error}", "please report it with this line")


def render(results: list[Result]) -> Renderable:
    states = max(len(result.state) for result in results)
    subjects = max(len(result.subject) for result in results)
    lines: list[Renderable] = []
    for result in results:
        space = " " * (states - len(result.state) + 1)
        lines.append(line(state(result.state), f"{space}{result.subject:<{subjects}} {result.finding}"))
        if result.remedy:
            lines.append(Span(" " * (states + subjects + 2) + f"→ {result.remedy}", "bold"))
    return Group(*lines)
