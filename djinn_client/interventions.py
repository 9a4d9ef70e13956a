"""Functions of this process at points between two blocks: a debugger's callback.

A session that has some has breakpoints there. Each of its calls is made in parts (parts.py): where one has stopped, the
functions see what has come there, what they change is sent as edits, and the next part goes on.

    call ──► part ──► a hit ──► functions ──► edits ──► part ──► … ──► its end: one Generated
               ▲                                 │
               └─────────────────────────────────┘
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, TypeAlias, TypeVar

from djinn_client import breaking
from djinn_client.breakpoints import HitInfo, When
from djinn_client.connection import Answer, Connection
from djinn_client.errors import InvalidRequest, NotPermitted, Retry
from djinn_client.exchange import close_all
from djinn_client.hits import Hit
from djinn_client.parts import Parts, expect_parts_possible
from djinn_client.protocol import EditAdded, Generate, Generated
from djinn_client.steps import Steps

if TYPE_CHECKING:
    from djinn_client.session import SessionSteps

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class InterventionContext:
    """Where a function is called.

    point       as the intervention names it
    layer       the block that has run last, counted from 0; None where none has
    positions   the session's positions that the activation's rows are of, a range
    when        "prefill": the positions that the call brings with its prompt, or without one the last one, at which it
                chooses; "decode": one that it has generated
    """

    point: str
    layer: int | None
    positions: range
    when: Literal["prefill", "decode"]


Function: TypeAlias = Callable[[Any, InterventionContext], Any]


class Intervention(Generic[T]):
    """A handle of an intervention, of this session. A fork that is made here has it, too; its end there is another."""

    def __init__(self, session: SessionSteps, id: int, run: Callable[[Steps[None]], T]) -> None:
        self.id = id  # its breakpoint's
        self._session = session
        self._run = run

    def remove(self) -> T:
        """From now on calls pass the point by. Again does nothing. Raises SessionBusy."""
        return self._run(remove(self._session, self.id))

    def __repr__(self) -> str:
        return f"<Intervention {self.id} of {self._session.info.id}>"


@dataclass(frozen=True, slots=True)
class _Entry:
    id: int
    point: str
    block: int
    when: When
    function: Function

    def is_at(self, hit: HitInfo) -> bool:
        there = {"always": True, "prefill": hit.first < hit.prompt_end, "decode": hit.end > hit.prompt_end}
        return self.block == hit.block and there[self.when]


class Interventions:
    """Those of one session, in the order in which they were made."""

    def __init__(self, entries: tuple[_Entry, ...] = ()) -> None:
        self._entries = entries

    def __bool__(self) -> bool:
        return bool(self._entries)

    def copy(self) -> Interventions:
        """For a fork, which has the breakpoints."""
        return Interventions(self._entries)

    def add(self, entry: _Entry) -> None:
        self._entries = (*self._entries, entry)

    def remove(self, id: int) -> None:
        self._entries = tuple(entry for entry in self._entries if entry.id != id)

    def run(self, session: SessionSteps, connection: Connection, request: Generate) -> Steps[Answer[Generated]]:
        """The whole call. It ends at a hit where there is no intervention, and where one has failed."""
        if any(entry.when != "prefill" for entry in self._entries):
            expect_parts_possible(request)
        parts = Parts(request)
        while True:
            answer = yield from session.run_over(connection, parts.next(), Generated)
            parts.add(answer.message)
            if parts.ended:
                close_all(answer.fds)
                session.stopped_at(None)  # the daemon has it at the hit yet: no call minds
                return Answer(parts.whole(), [])
            at = answer.message.hit
            here = [] if at is None else [entry for entry in self._entries if entry.is_at(at)]
            if not here:
                return Answer(parts.whole(), answer.fds)
            hit = Hit(answer.message, answer.fds)
            for entry in here:
                _call(entry, hit)
            for edit in breaking.replacing(session, hit, None, hit.changes(None)):
                yield from connection.call(edit, EditAdded)


def add(session: SessionSteps, point: str, function: Function, local: bool, when: When) -> Steps[int]:
    """The intervention's id."""
    if not local:
        raise NotPermitted(
            "this version of the daemon runs no code of its clients: intervene(point, function, local=True) calls the "
            "function in this process, where the session's calls stop for it"
        )
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise InvalidRequest(f"{function!r} is no plain function(activation, context)", field="function")
    id = yield from breaking.add(session, point, None, when, 1, None)
    points = yield from session.points()
    if points is None:
        yield from breaking.remove(session, id)
        raise Retry(f"{session.info.model} has just been unloaded: once more, and it is loaded again")
    if session.interventions is None:
        session.interventions = Interventions()
    session.interventions.add(_Entry(id, point, points.resolve(point)[point].block, when, function))
    return id


def remove(session: SessionSteps, id: int) -> Steps[None]:
    yield from breaking.remove(session, id)
    if session.interventions is not None:
        session.interventions.remove(id)


def _call(entry: _Entry, hit: Hit) -> None:
    when: Literal["prefill", "decode"] = "prefill" if hit.info.first < hit.info.prompt_end else "decode"
    returned = entry.function(hit.activation, InterventionContext(entry.point, hit.layer, hit.positions, when))
    if returned is not None:
        hit.activation = returned
