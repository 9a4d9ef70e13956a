"""`djinnctl doctor`: one list of checks. Each gathers facts at the edge and judges them in a pure function."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial

from djinnctl.doctor import arena, daemon, gpu, memory, software
from djinnctl.doctor.result import Result, fail
from djinnctl.layout import Group, Renderable, Span, line
from djinnctl.render import state

Check = Callable[[], Iterable[Result]]


def checks(address: str | None, fix: bool) -> list[tuple[str, Check]]:
    """The checks in the order in which a person would look. Without djinnd in this Python, the machine is left out."""
    here: list[tuple[str, Check]] = [("Python", software.check_python), ("packages", software.check_packages)]
    if not software.has_daemon():
        return [*here, ("socket", partial(daemon.check, address)), ("daemon", partial(daemon.check_notes, address))]
    return [
        *here,
        ("GPU", gpu.check),
        ("memory", memory.check_memory),
        ("memlock", memory.check_memlock),
        ("/dev/shm", memory.check_shm),
        ("socket", partial(daemon.check, address)),
        ("daemon", partial(daemon.check_notes, address)),
        ("arena", partial(arena.check, fix=fix)),
    ]


def examine(*, address: str | None = None, fix: bool = False) -> list[Result]:
    return [result for subject, check in checks(address, fix) for result in _sheltered(subject, check)]


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
