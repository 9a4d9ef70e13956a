"""Stopping inside the model and going on, in steps: breakpoints, `run` and `resume`. See probing.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from djinn_client.arguments.options import GenerateOptions, build, generate_request
from djinn_client.errors import InvalidRequest
from djinn_client.protocol import (
    AddBreakpoint,
    AddEdit,
    BreakpointAdded,
    Breakpoints,
    Done,
    EditAdded,
    EndBreakpoints,
    Generate,
    Generated,
    ListBreakpoints,
)
from djinn_client.protocol.fields.breakpoints import BreakpointInfo
from djinn_client.session.calls import SessionSteps
from djinn_client.tensors.arrays import expect_arrays
from djinn_client.tensors.checkpoints import Checkpoint
from djinn_client.tensors.hits import Hit
from djinn_client.tensors.values import MAX_VALUES, positions_of
from djinn_client.transport.exchange import close_all
from djinn_client.transport.steps import Steps
from djinn_client.whitebox.probing import patch

T = TypeVar("T")


class Breakpoint(Generic[T]):
    """A handle of a breakpoint, of this session. A fork has it, too, under the same id; its end there is another."""

    def __init__(self, session: SessionSteps, id: int, run: Callable[[Steps[None]], T]) -> None:
        self.id = id
        self._session = session
        self._run = run

    def remove(self) -> T:
        """Calls stop there no more; one that has stopped there still can be gone on with. Again does nothing. Raises
        SessionBusy."""
        return self._run(remove(self._session, self.id))

    def __repr__(self) -> str:
        return f"<Breakpoint {self.id} of {self._session.info.id}>"


def add(
    session: SessionSteps,
    point: str | None,
    layer: int | None,
    when: str,
    every: int,
    positions: Iterable[int] | None,
) -> Steps[int]:
    """The breakpoint's id."""
    if (point is None) == (layer is None):
        raise InvalidRequest("name the breakpoint's point, or a layer behind which to stop", field="point")
    expect_arrays("a breakpoint's activation")
    request = build(
        AddBreakpoint,
        session=session.info.id,
        point=f"blocks.{layer}.hook_resid_post" if point is None else point,
        when=when,
        every=every,
        positions=None if positions is None else positions_of(positions),
    )
    return (yield from session.call(request, BreakpointAdded)).message.breakpoint


def remove(session: SessionSteps, number: int) -> Steps[None]:
    yield from session.call(build(EndBreakpoints, session=session.info.id, breakpoints=[number]), Done)


def breakpoints(session: SessionSteps) -> Steps[list[BreakpointInfo]]:
    request = build(ListBreakpoints, session=session.info.id)
    return (yield from session.call(request, Breakpoints)).message.breakpoints


def run_on(
    session: SessionSteps, prompt: str | Iterable[int] | None, options: GenerateOptions
) -> Steps[Hit | Generated]:
    return (yield from _call(session, generate_request(session.info.id, prompt, options, stream=False)))


def resume(
    session: SessionSteps, replacement: Any, from_: Checkpoint | None, options: GenerateOptions
) -> Steps[Hit | Generated | None]:
    """None: of a session that was paused, or nothing."""
    if session.at is None and replacement is None and from_ is None and not options:
        yield from session.unpause()
        return None
    request = generate_request(session.info.id, None, options, stream=False)
    request.resume = True
    hit = session.hit if session.at is not None else None
    if from_ is not None and from_ is not hit:
        # All rows: edits may have changed any of them since.
        edits = replacing(session.info.id, from_, replacement, range(len(from_.positions)))
        yield from session.truncate(from_.info.end)
        for edit in edits:
            yield from session.call(edit, EditAdded)
        request.hit = from_.info
    elif hit is not None:
        for edit in replacing(session.info.id, hit, replacement, hit.changes(replacement)):
            yield from session.call(edit, EditAdded)
            hit.wrote(edit.positions or ())
    elif replacement is not None:
        if session.at is None:
            raise InvalidRequest(
                "the session is at no hit that this could replace: run it, or say from_", field="resume"
            )
        yield from patch(session, replacement, session.at.point, range(session.at.first, session.at.end))
    return (yield from _call(session, request))


def _call(session: SessionSteps, request: Generate) -> Steps[Hit | Generated]:
    answer = yield from session.call(request, Generated)
    if answer.message.hit is None:
        close_all(answer.fds)
        return answer.message
    session.hit = Hit(answer.message, answer.fds)
    return session.hit


def replacing(session: str, checkpoint: Checkpoint, replacement: Any, rows: Sequence[int]) -> list[AddEdit]:
    """The requests for the edits, as few as can carry them. Raises InvalidRequest before anything is sent."""
    most = max(1, MAX_VALUES // checkpoint.row_bytes)
    edits = []
    for part in (rows[start : start + most] for start in range(0, len(rows), most)):
        values = checkpoint.values(replacement, part)
        edit = build(
            AddEdit,
            session=session,
            points=[checkpoint.point],
            op="replace",
            positions=[checkpoint.positions[row] for row in part],
            rows=values.rows,
            dtype=values.dtype,
            values=values.data,
        )
        edits.append(edit)
    return edits
