"""Checks of breakpoints, and of calls that may stop at one or continue from one. Each function takes values, and
returns a value or raises an error."""

from __future__ import annotations

from djinn_client.errors import InvalidRequest, QuotaExceeded
from djinn_client.protocol import AddBreakpoint, Generate, ModelInfo
from djinn_client.protocol.fields.breakpoints import HitInfo
from djinn_client.protocol.fields.kv_layout import ITEM_BYTES
from djinn_client.protocol.fields.points import Point, PointMap
from djinnd.config import Limits
from djinnd.core.stops import Stop
from djinnd.server.admission import admission
from djinnd.server.admission.captures import MAX_CAPTURE_BYTES, computed
from djinnd.server.admission.edits import check_positions, extents_at
from djinnd.server.probe_lists.breakpoint_list import BreakpointList, CallSpan, SessionBreakpoint
from djinnd.server.sessions.session import SessionRecord


def breakpoint_of(request: AddBreakpoint, breakpoints: BreakpointList, model: ModelInfo) -> SessionBreakpoint:
    """Returns the session's next breakpoint, as requested. Raises InvalidRequest."""
    admission.expect(request.every >= 1, "every", request.every, "1 or more")
    if request.every > 1 and request.when == "prefill":
        raise InvalidRequest('every counts generated positions, and when="prefill" has none', field="every")
    extents = None
    if request.positions is not None:
        if request.every > 1:
            raise InvalidRequest("positions already name each place: leave every out", field="every")
        check_positions(request.positions, model)
        extents = tuple(extents_at(request.positions, each_its_own=False))
    points = admission.points_named([request.point], model, "point")
    if request.point not in points:
        raise InvalidRequest(f"a breakpoint is at one point: {request.point!r} names several", field="point")
    point = points[request.point]
    _check_between_blocks(request.point, point, admission.points_of(model))
    return SessionBreakpoint(breakpoints.given + 1, request.point, point.block, request.when, request.every, extents)


def check_room(breakpoint: SessionBreakpoint, breakpoints: BreakpointList, limits: Limits) -> None:
    """Checks that the session may have one more breakpoint. Raises QuotaExceeded."""
    used, most = breakpoints.count, limits.breakpoints_per_session
    if used + breakpoint.count > most:
        raise QuotaExceeded(
            f"the session's breakpoints count as {used:,} and this one as {breakpoint.count:,}; "
            f"limits.breakpoints_per_session is {most:,}, and one at positions counts for each span of them: remove "
            "some, or name fewer spans",
            quota="breakpoints_per_session",
            limit=most,
            used=used,
            needed=breakpoint.count,
        )


def hit_of(request: Generate, session: SessionRecord, model: ModelInfo) -> HitInfo | None:
    """The hit from which the call continues; None if it does not continue from one. Raises InvalidRequest."""
    if not request.resume:
        if request.hit is not None:
            raise InvalidRequest("a call with a hit continues from it: it needs resume", field="hit")
        return None
    if request.capture:
        raise InvalidRequest(
            "a call that continues from a hit cannot capture: the hit has the activation where it stopped; capture in "
            "the next call, or on a fork",
            field="capture",
        )
    if request.text is not None or request.token_ids is not None or request.chat is not None:
        raise InvalidRequest(
            "a call that continues from a hit takes no prompt: resume without one, or generate with one, which begins "
            "behind the hit's positions",
            field="resume",
        )
    hit = session.breakpoints.hit if request.hit is None else request.hit
    if hit is None:
        raise InvalidRequest(
            "the session is at no hit: its last call did not stop at a breakpoint, or its tokens have "
            "changed since; resume_from(hit) goes back to one",
            field="resume",
        )
    if hit.end != len(session.tokens):
        raise InvalidRequest(
            f"the hit is at positions {hit.first:,} to {hit.end - 1:,} and the session has {len(session.tokens):,} "
            f"tokens: truncate it to {hit.end:,}",
            field="hit",
        )
    blocks = admission.points_of(model).blocks
    if not (0 <= hit.first < hit.end and 0 <= hit.prompt_end <= hit.end and 0 <= hit.block <= blocks):
        raise InvalidRequest(f"no call of this session has stopped there: {hit}", field="hit")
    return hit


def call_span(request: Generate, prompt_tokens: int, session: SessionRecord, model: ModelInfo, kept: int) -> CallSpan:
    """The range of positions that a call may compute behind the first `kept` tokens of the session. Raises the errors
    of `hit_of`."""
    hit, (first, end) = hit_of(request, session, model), computed(request, prompt_tokens, session, model, kept)
    if hit is not None:
        return CallSpan(min(session.due_from, hit.first), hit.prompt_end, kept, end, hit)
    return CallSpan(first, kept + prompt_tokens, kept + prompt_tokens, end)


def stops_of(request: Generate, reach: CallSpan, breakpoints: BreakpointList, model: ModelInfo) -> list[Stop]:
    """The places where a call may stop. A call that captures does not stop. Raises InvalidRequest."""
    if request.capture:
        return []
    stops = breakpoints.stops(reach)
    if not stops:
        return []
    points = admission.points_of(model)
    if stops[-1].block > points.blocks:
        raise InvalidRequest(
            f"the session has breakpoints behind block {stops[-1].block - 1}, and {model.name} has "
            f"{points.blocks} blocks now: remove them"
        )
    positions = max(1, reach.length - reach.first)
    nbytes = positions * points.width * ITEM_BYTES[model.dtype]  # type: ignore[index]
    if nbytes > MAX_CAPTURE_BYTES:
        raise InvalidRequest(
            f"{positions:,} positions that stop at a breakpoint are {nbytes:,} bytes of {model.dtype}; the limit is "
            f"{MAX_CAPTURE_BYTES:,}: send the prompt in parts",
            bytes=nbytes,
            limit=MAX_CAPTURE_BYTES,
        )
    return stops


def _check_between_blocks(name: str, point: Point, model: PointMap) -> None:
    """Raises InvalidRequest, with the nearest possible point, if a call cannot stop at this point."""
    if point.where == "resid":
        return
    block = model.blocks - 1 if point.is_behind else point.block
    near = f"blocks.{block}.hook_resid_{'pre' if point.where == 'attn' else 'post'}"
    raise InvalidRequest(
        f"{name} is not between two blocks, and a call stops between blocks only: the nearest is {near}; "
        f"{name} itself can be captured and patched",
        field="point",
        nearest=near,
    )
