"""Checks of edits, before a session has them. Each function takes values, and returns an Edit or raises an error."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain, pairwise

from djinn_client.errors import InvalidRequest, QuotaExceeded
from djinn_client.protocol import AddEdit, ModelInfo
from djinn_client.protocol.fields.kv_layout import ITEM_BYTES
from djinnd.config import Limits
from djinnd.core.edits import Edit, Extent, now
from djinnd.server.admission import admission
from djinnd.server.admission.values import first_unfinite, has_direction
from djinnd.server.probe_lists.edit_list import EditList, nbytes_of

_MAX_FLOAT32 = 3.4028234663852886e38  # scales and bounds are float32 on the device
_SCALED = ("add", "scale", "project_out")
_DIRECTED = ("project_out", "clamp")


def check_form(request: AddEdit) -> None:
    """Checks everything that does not depend on the model. Raises InvalidRequest."""
    if not request.points:
        raise InvalidRequest("name the points to edit", field="points")
    _check_figures(request)
    _check_rows(request)
    if request.op == "replace":  # any value may replace an activation
        return
    place = first_unfinite(request.values, request.dtype)
    if place is not None:
        raise InvalidRequest(
            f"the values have a NaN or an infinity at index {place:,}: {request.op} needs finite numbers; replace "
            "takes any",
            field="values",
            index=place,
        )


def edit_of(request: AddEdit, edits: EditList, tokens: int, fixed: int, model: ModelInfo) -> Edit:
    """Returns the next edit of a session with `tokens` tokens, of which the first `fixed` cannot be computed again. The
    request has passed `check_form`. Raises InvalidRequest."""
    points = admission.points_named(request.points, model, "points")
    widths = {admission.points_of(model).width_at(point) for point in points.values()}
    if len(widths) > 1:
        told = " and ".join(f"{width:,}" for width in sorted(widths))
        raise InvalidRequest(f"the points are {told} wide: an edit has points of one width", field="points")
    _check_values(request, *widths)
    extents = _extents_of(request, tokens, fixed, model)
    return Edit(
        edits.given + 1,
        tuple(dict.fromkeys(points.values())),
        request.op,
        extents,
        scale=request.scale,
        low=-math.inf if request.low is None else request.low,
        high=math.inf if request.high is None else request.high,
        dtype=request.dtype,
        rows=request.rows,
        values=request.values,
    )


def check_room(edit: Edit, names: Sequence[str], edits: EditList, limits: Limits) -> None:
    """Checks that a session with these edits may have one more, with points of these names. Raises QuotaExceeded."""
    count, most = len(edits.edits), limits.edits_per_session
    if count >= most:
        raise QuotaExceeded(
            f"the session has {count:,} edits, and limits.edits_per_session is {most:,}; ended edits count "
            "as long as the session has positions that they changed: truncate it to before them, or open another",
            quota="edits_per_session",
            limit=most,
            used=count,
        )
    crowd, most = _crowd(edit, edits), limits.edits_per_position
    if crowd >= most:
        raise QuotaExceeded(
            f"the session has {crowd:,} edits at one point within the range of this one's positions, and "
            f"limits.edits_per_position is {most:,}: end some, or combine several that add",
            quota="edits_per_position",
            limit=most,
            used=crowd,
        )
    used, needed, room = edits.nbytes, nbytes_of(edit, names), limits.edit_bytes_per_session
    if used + needed > room:
        raise QuotaExceeded(
            f"the edit takes {needed:,} bytes and the session's others {used:,}; limits.edit_bytes_per_session is "
            f"{room:,}: give fewer rows, bfloat16 instead of float32, or truncate the session to before its ended "
            "edits",
            quota="edit_bytes_per_session",
            limit=room,
            used=used,
            needed=needed,
        )


def _crowd(edit: Edit, edits: EditList) -> int:
    """The most edits of the session that may overlap this one at one of its points. Compares first and last positions
    only, and not the gaps between an edit's positions."""
    about = (other for other in edits.edits if other.first < edit.end and edit.first < other.end)
    at = Counter(chain.from_iterable(other.points for other in about))
    return max(at[point] for point in edit.points)


def check_fit(edits: EditList, model: ModelInfo) -> None:
    """Checks that the edits still fit the model, which may have changed since they were made. Raises InvalidRequest."""
    points = admission.points_of(model)
    for edit in edits.edits:
        for point in edit.points:
            blocks = points.blocks + (point.where == "resid")
            needed = edit.rows * points.width_at(point) * ITEM_BYTES[edit.dtype]
            if point.block >= blocks or needed != len(edit.values):
                raise InvalidRequest(
                    f"edit {edit.number} of the session no longer fits {model.name}, which has "
                    f"{points.blocks} blocks of width {points.width:,}: continue with its tokens in a new "
                    "session",
                    edit=edit.number,
                )


def _check_figures(request: AddEdit) -> None:
    op = request.op
    for name in ("scale", "low", "high"):
        figure = getattr(request, name)
        is_valid = figure is None or abs(figure) <= _MAX_FLOAT32
        admission.expect(is_valid, name, figure, "a finite number of float32")
    if request.scale != 1.0 and op not in _SCALED:
        raise InvalidRequest(f"scale is {request.scale:g}, and {op} has none: {', '.join(_SCALED)} do", field="scale")
    low, high = request.low, request.high
    if op != "clamp":
        for name, bound in (("low", low), ("high", high)):
            if bound is not None:
                raise InvalidRequest(f"{name} is {bound:g}, and {op} has none: clamp does", field=name)
    elif low is None and high is None:
        raise InvalidRequest("clamp needs low, high or both", field="low")
    elif low is not None and high is not None and low > high:
        raise InvalidRequest(f"low is {low:g} and high {high:g}: low must not be above high", field="low")


def check_positions(positions: Sequence[int], model: ModelInfo) -> None:
    """Checks that positions ascend and fit the model. Raises InvalidRequest."""
    if not positions:
        raise InvalidRequest("positions is empty: name some, or leave it out to edit from now on", field="positions")
    highest = max(positions[-1], len(positions) - 1)
    if highest >= model.max_context:
        told = f"position {highest:,} never comes: {model.name} has 0 to {model.max_context - 1:,}"
        raise InvalidRequest(told, field="positions", max_context=model.max_context)
    if positions[0] < 0:
        raise InvalidRequest(f"position {positions[0]} is negative: count from 0", field="positions")
    for before, after in pairwise(positions):
        if before >= after:
            raise InvalidRequest(f"position {after:,} comes after {before:,}: positions ascend", field="positions")


def _check_rows(request: AddEdit) -> None:
    if request.op == "scale":
        if request.rows or request.values:
            raise InvalidRequest("scale has no values: rows must be 0", field="rows")
        return
    count = 1 if request.positions is None else len(request.positions)
    if request.rows not in (1, count):
        wanted = f"1, or {count:,}, one for each position" if count > 1 else "1"
        raise InvalidRequest(f"{request.op} has {request.rows:,} rows of values; it must be {wanted}", field="rows")


def _extents_of(request: AddEdit, tokens: int, fixed: int, model: ModelInfo) -> tuple[Extent, ...]:
    positions = request.positions
    if positions is None:
        return (Extent(now(tokens)),)
    check_positions(positions, model)
    if positions[0] < fixed:
        raise InvalidRequest(
            f"the KV of this session's beginning came from a client and cannot be computed again: position "
            f"{positions[0]:,} cannot be edited, positions from {fixed:,} on can; or open a new session with its "
            "tokens",
            field="positions",
            first=fixed,
        )
    return tuple(extents_at(positions, each_its_own=request.rows > 1))


def _check_values(request: AddEdit, width: int) -> None:
    row = width * ITEM_BYTES[request.dtype]
    if len(request.values) != request.rows * row:
        wanted = f"[{request.rows}, {width}]"
        given, odd = divmod(len(request.values), request.rows * ITEM_BYTES[request.dtype])
        came = f"the values are {len(request.values):,} bytes" if odd else f"the values are [{request.rows}, {given}]"
        raise InvalidRequest(
            f"{came}, and {request.points[0]} is {width:,} wide: give {wanted} in {request.dtype}",
            field="values",
            bytes=len(request.values),
            needed=request.rows * row,
            width=width,
        )
    if request.op not in _DIRECTED:
        return
    for index in range(request.rows):
        if not has_direction(request.values[index * row : (index + 1) * row], request.dtype):
            told = f"row {index:,} of the values is zero, or nearly: {request.op} needs one that has a direction"
            raise InvalidRequest(told, field="values", row=index)


def extents_at(positions: Sequence[int], each_its_own: bool) -> Iterator[Extent]:
    """Groups ascending positions into runs of neighbours. `each_its_own`: each position has its own row of values."""
    gaps = [index for index in range(1, len(positions)) if positions[index] != positions[index - 1] + 1]
    for first, after in pairwise([0, *gaps, len(positions)]):
        yield Extent(positions[first], positions[after - 1] + 1, first if each_its_own else 0)
