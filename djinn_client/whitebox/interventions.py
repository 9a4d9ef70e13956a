"""Functions at points between two blocks: here, as a debugger's callback, or in the daemon's intervention process.

A session with functions has breakpoints there. Each of its calls is made in parts (split_call.py): when a part has
stopped, the functions see the activation, their changes become edits, and the next part goes on.

    call ──► part ──► a hit ──► functions ──► edits ──► part ──► … ──► its end: one Generated
               ▲                                 │
               └─────────────────────────────────┘

Functions in the daemon see the window of the hit, and their edits are made there. A function here writes to this
process's copy of that window, so a point has functions of one kind only. The daemon does not keep functions: after its
restart or the end of the intervention process, and for a fork, they are sent when they are next needed.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from djinn_client.arguments.options import build
from djinn_client.errors import DjinnError, FunctionNotFound, InvalidRequest, Retry
from djinn_client.protocol import AddFunction, Done, EditAdded, Generate, Generated, RunFunctions
from djinn_client.protocol.fields.breakpoints import HitInfo, When
from djinn_client.session.calls import SessionCalls
from djinn_client.session.connected import ConnectedSession
from djinn_client.tensors.hits import Hit
from djinn_client.transport.connection import Connection
from djinn_client.transport.exchange import Delivery, close_all
from djinn_client.transport.steps import Steps
from djinn_client.whitebox import breakpoint_calls
from djinn_client.whitebox.functions import PYTHON, code_of
from djinn_client.whitebox.handles import Handle
from djinn_client.whitebox.split_call import SplitCall, expect_splittable

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


class Intervention(Handle[T]):
    """A handle of an intervention, of this session. A fork made by this process has it, too, and removes it
    separately."""

    def remove(self) -> T:
        """Calls no longer stop at the point. A second time does nothing. Raises SessionBusy."""
        return self._run(remove(self._session, self.id))


@dataclass(frozen=True, slots=True)
class _Entry:
    id: int
    point: str
    block: int
    when: When
    function: Function
    code: bytes | None  # None: it is called here

    def is_at(self, hit: HitInfo) -> bool:
        there = {"every": True, "prefill": hit.first < hit.prompt_end, "decode": hit.end > hit.prompt_end}
        return self.block == hit.block and there[self.when]


class Interventions:
    """The interventions of one session, in the order in which they were made."""

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

    def expect_kind(self, block: int, local: bool) -> None:
        """Raises InvalidRequest if functions at that block run in the other place: here, or in the daemon."""
        if any(entry.block == block and (entry.code is None) != local for entry in self._entries):
            there, here = ("local=True", "one without") if not local else ("no local=True", "one with it")
            raise InvalidRequest(
                f"the session has a function at this point that was made with {there}, and {here} would not see what "
                "that has changed: all of a point run in one place",
                field="local",
            )

    def run(self, session: ConnectedSession, connection: Connection, request: Generate) -> Steps[Delivery[Generated]]:
        """Runs the whole call. A hit without an intervention ends it early, and so does a function that fails."""
        if any(entry.when != "prefill" for entry in self._entries):
            expect_splittable(request)
        split = SplitCall(request)
        while True:
            answer = yield from session.run_over(connection, split.next(), Generated)
            split.add(answer.message)
            if split.ended:
                close_all(answer.fds)
                session.stopped_at(None)  # in the daemon it stays at the hit, which later calls ignore
                return Delivery(split.whole(), [])
            at = answer.message.hit
            here = [] if at is None else [entry for entry in self._entries if entry.is_at(at)]
            if not here:
                return Delivery(split.whole(), answer.fds)
            if here[0].code is None:
                yield from _run_here(session, connection, here, Hit(answer.message, answer.fds))
            else:
                yield from _run_there(session, connection, here, answer)


def intervene(
    session: SessionCalls, point: str, function: Function, *, local: bool = False, when: When = "every"
) -> Steps[int]:
    """Calls `function(activation, context)` at this point, between two blocks, in each call of the session until
    the intervention is removed. The activation is [1, positions, width], as `Hit.activation` is. The call goes on
    with the values that the function has written to it or returned: `run`, `generate` and `resume` return as if
    they had not stopped. InterventionContext has what else the function is told.

    With `local=True` the function runs in this process, in the thread that waits for the call; meanwhile the
    session takes no other call (SessionBusy). The call raises the function's exception and leaves the session
    there.

    Without it the function is pickled (cloudpickle) and runs in the daemon, in a process of this user without files
    and network and with limits of time and memory; NotPermitted unless the daemon's configuration names the user.
    The call raises FunctionFailed if the function raises or is ended. A point has functions of one kind only.

    Several functions at one point are called in the order in which they were made. `when` is that of `breakpoint`,
    and "every" by default; "prefill" costs nothing at generated tokens. `stream`, `forward` and `capture` cannot
    stop for a function, and are refused (SessionStateError).

    Raises what `breakpoint` raises, and InvalidRequest for a function that cannot be pickled or is more than a call
    can carry (15 MiB). Its calls raise InvalidRequest for a replacement of another shape or dtype."""
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise InvalidRequest(f"{function!r} is no plain function(activation, context)", field="function")
    code = None if local else code_of(function)
    id = yield from breakpoint_calls.breakpoint(session, point, when=when)
    when = "every" if when == "always" else when
    others = _of(session)
    try:
        points = yield from session.points()
        if points is None:
            raise Retry(f"{session.info.model} has just been unloaded: once more, and it is loaded again")
        entry = _Entry(id, point, points.resolve(point)[point].block, when, function, code)
        others.expect_kind(entry.block, local)
        if code is not None:
            yield from session.call(_sending(session, entry), Done)
    except DjinnError:  # without the function its breakpoint has no use
        with suppress(DjinnError):  # the caller must see the first error
            yield from breakpoint_calls.remove(session, id)
        raise
    others.add(entry)
    session.interventions = others
    return id


def remove(session: SessionCalls, id: int) -> Steps[None]:
    yield from breakpoint_calls.remove(session, id)
    _of(session).remove(id)


def _of(session: SessionCalls) -> Interventions:
    return session.interventions if isinstance(session.interventions, Interventions) else Interventions()


def apply(function: Function, point: str, hit: Hit) -> None:
    """Calls the function with the hit's activation. `point`: as the intervention names it. Raises the function's
    exception."""
    when: Literal["prefill", "decode"] = "prefill" if hit.info.first < hit.info.prompt_end else "decode"
    returned = function(hit.activation, InterventionContext(point, hit.layer, hit.positions, when))
    if returned is not None:
        hit.activation = returned


def _run_here(session: ConnectedSession, connection: Connection, entries: Sequence[_Entry], hit: Hit) -> Steps[None]:
    for entry in entries:
        apply(entry.function, entry.point, hit)
    for edit in breakpoint_calls.replacing(session.info.id, hit, None, hit.changes(None)):
        yield from connection.call(edit, EditAdded)


def _run_there(
    session: ConnectedSession, connection: Connection, entries: Sequence[_Entry], stopped: Delivery[Generated]
) -> Steps[None]:
    """Closes the descriptors that came with the hit."""
    try:
        ids, captured = [entry.id for entry in entries], stopped.message.captured
        request = build(RunFunctions, session=session.info.id, breakpoints=ids, captured=captured)
        try:
            yield from connection.call(request, Done, fds=stopped.fds)
        except FunctionNotFound:
            for entry in entries:
                yield from connection.call(_sending(session, entry), Done)
            yield from connection.call(request, Done, fds=stopped.fds)
    finally:
        close_all(stopped.fds)


def _sending(session: ConnectedSession, entry: _Entry) -> AddFunction:
    return build(AddFunction, session=session.info.id, breakpoint=entry.id, code=entry.code, python=PYTHON)
