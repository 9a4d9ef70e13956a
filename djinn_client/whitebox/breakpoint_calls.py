"""Stopping inside the model and going on, in steps: breakpoints, `run`, `resume`, `resume_from`. See probing.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from djinn_client.arguments.options import GenerateOptions, build, generate_request
from djinn_client.errors import InvalidRequest, SessionStateError
from djinn_client.old_names import warn_of
from djinn_client.protocol import replies, requests
from djinn_client.protocol.fields.breakpoints import BreakpointInfo, When
from djinn_client.session.calls import SessionCalls
from djinn_client.tensors.arrays import expect_arrays
from djinn_client.tensors.hits import Hit
from djinn_client.tensors.resume_points import ResumePoint
from djinn_client.tensors.values import MAX_VALUES, positions_of
from djinn_client.transport.exchange import close_all
from djinn_client.transport.steps import Steps
from djinn_client.whitebox.handles import Handle
from djinn_client.whitebox.probing import patch

if TYPE_CHECKING:
    from typing import Unpack

T = TypeVar("T")


class Breakpoint(Handle[T]):
    """A handle of a breakpoint, of this session. A fork has it, too, under the same id, and removes it separately."""

    def remove(self) -> T:
        """Calls no longer stop there; a call that has stopped there can still be resumed. A second time does nothing.
        Raises SessionBusy."""
        return self._run(remove(self._session, self.id))


def breakpoint(
    session: SessionCalls,
    point: str | None = None,
    *,
    layer: int | None = None,
    when: When | None = None,
    every: int = 1,
    positions: Iterable[int] | None = None,
) -> Steps[int]:
    """Calls of the session stop when one of its positions comes to this point, which lies between two blocks.
    `layer=20` is "blocks.20.hook_resid_post", the output of block 20. Other sessions run on.

    A call stops once, at the end of its prompt ("prefill"). `when="decode"` stops at each generated token instead,
    or at each `every`th, and `when="every"` at both. `positions`, ascending, chooses some of these positions; with
    `positions` or `every` and without `when`, prompt and generated ones count. A breakpoint belongs to the session
    and its forks until it is removed.

    Raises InvalidRequest for a point within a block, or one that the model does not have; SessionBusy,
    QuotaExceeded, Retry."""
    if when is None:
        when = "prefill" if every == 1 and positions is None else "every"
    elif when == "always":
        warn_of('when="always"', 'when="every"', stacklevel=5)  # these steps are run by `handled`
        when = "every"
    if (point is None) == (layer is None):
        raise InvalidRequest("name the breakpoint's point, or a layer behind which to stop", field="point")
    expect_arrays("a breakpoint's activation")
    request = build(
        requests.AddBreakpoint,
        session=session.info.id,
        point=f"blocks.{layer}.hook_resid_post" if point is None else point,
        when=when,
        every=every,
        positions=None if positions is None else positions_of(positions),
    )
    return (yield from session.call(request, replies.BreakpointAdded)).message.breakpoint


def remove(session: SessionCalls, number: int) -> Steps[None]:
    yield from session.call(build(requests.EndBreakpoints, session=session.info.id, breakpoints=[number]), replies.Done)


def breakpoints(session: SessionCalls) -> Steps[list[BreakpointInfo]]:
    request = build(requests.ListBreakpoints, session=session.info.id)
    return (yield from session.call(request, replies.Breakpoints)).message.breakpoints


def run(
    session: SessionCalls, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]
) -> Steps[Hit | replies.Generated]:
    """Generates and stops at breakpoints. Returns a Hit, or a Generated if no breakpoint has stopped it.

        s.breakpoint(layer=20)
        hit = s.run("The Eiffel Tower is in")
        hit.activation[:, -1] *= 0.9
        out = s.resume(max_tokens=20)

    (`generate` and `stream` stop there, too, with `finish_reason` "breakpoint".) Raises what `generate` raises."""
    return (yield from _call(session, generate_request(session.info.id, prompt, options, stream=False)))


def resume(
    session: SessionCalls, replacement: Any = None, **options: Unpack[GenerateOptions]
) -> Steps[Hit | replies.Generated]:
    """Resumes from the hit at which the session has stopped: from the next block, with the activation as it is now in
    `hit.activation`, or with `replacement`, of the same shape and dtype. Changed values replace those that were there,
    by an edit (see `patch`); without changes the call goes on as if it had not stopped. Returns a Hit at the next
    breakpoint, or a Generated. The options are those of `generate`, and count from here.

    If written NaN or infinities lead to such logits, the Generated ends there with `finish_reason` "not_finite".

    Raises SessionStateError where the session is at no hit, InvalidRequest for a replacement of another shape or
    dtype, and for a hit that is gone; SessionBusy, QuotaExceeded, Retry. Nothing has changed then."""
    session.expect_held()
    start = cast("dict[str, Any]", options).pop("from_", None)
    if start is not None:
        warn_of("resume(from_=hit)", "resume_from(hit)")
        return (yield from resume_from(session, start, replacement, **options))
    if session.at is None and session.is_paused and replacement is None and not options:
        warn_of("resume() of a paused session", "unpause()")
        yield from session.unpause()
        return None  # type: ignore[return-value]  # as before
    if session.at is None:
        raise SessionStateError(
            "the session is at no breakpoint: run it until it stops, or say resume_from(hit); unpause() ends a pause",
            field="resume",
        )
    request = _resuming(session, options)
    if (hit := session.hit) is not None:
        for edit in replacing(session.info.id, hit, replacement, hit.changes(replacement)):
            yield from session.call(edit, replies.EditAdded)
            hit.wrote(edit.positions or ())
    elif replacement is not None:
        yield from patch(session, replacement, session.at.point, positions=range(session.at.first, session.at.end))
    return (yield from _call(session, request))


def resume_from(
    session: SessionCalls, start: ResumePoint, replacement: Any = None, **options: Unpack[GenerateOptions]
) -> Steps[Hit | replies.Generated]:
    """Resumes from this hit or resume point, any number of times, even if the session has continued since or is a fork
    of the session that had it. The session is truncated to the point's last position first. Raises what `resume`
    raises."""
    if session.at is not None and start is session.hit:
        return (yield from resume(session, replacement, **options))
    request = _resuming(session, options)
    request.hit = start.info
    # All rows: edits may have changed any of them since.
    edits = replacing(session.info.id, start, replacement, range(len(start.positions)))
    yield from session.truncate(start.info.end)
    for edit in edits:
        yield from session.call(edit, replies.EditAdded)
    return (yield from _call(session, request))


def _resuming(session: SessionCalls, options: GenerateOptions) -> requests.Generate:
    request = generate_request(session.info.id, None, options, stream=False)
    request.resume = True
    return request


def _call(session: SessionCalls, request: requests.Generate) -> Steps[Hit | replies.Generated]:
    answer = yield from session.call(request, replies.Generated)
    if answer.message.hit is None:
        close_all(answer.fds)
        return answer.message
    session.hit = Hit(answer.message, answer.fds)
    return session.hit


def replacing(session: str, start: ResumePoint, replacement: Any, rows: Sequence[int]) -> list[requests.AddEdit]:
    """The requests for edits that replace these rows, as few as possible. Raises InvalidRequest."""
    most = max(1, MAX_VALUES // start.row_bytes)
    edits = []
    for part in (rows[start : start + most] for start in range(0, len(rows), most)):
        values = start.values(replacement, part)
        edit = build(
            requests.AddEdit,
            session=session,
            points=[start.point],
            op="replace",
            positions=[start.positions[row] for row in part],
            rows=values.rows,
            dtype=values.dtype,
            values=values.data,
        )
        edits.append(edit)
    return edits
