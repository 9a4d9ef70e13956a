"""Looking and changing inside the model: edits (steer, patch), and captures. The calls of a session, as steps.

See docs/guide/whitebox.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from djinn_client.arguments.options import GenerateOptions, build, generate_request
from djinn_client.errors import Cancelled, InvalidRequest, SessionStateError
from djinn_client.protocol import AddEdit, Done, EditAdded, Edits, EndEdits, Generated, ListEdits
from djinn_client.protocol.fields.edits import EditInfo, Op
from djinn_client.session.calls import SessionCalls
from djinn_client.tensors.arrays import expect_arrays
from djinn_client.tensors.cache import Cache, mapped
from djinn_client.tensors.values import Values, positions_of, values_of
from djinn_client.transport.steps import Steps
from djinn_client.whitebox.handles import Handle

if TYPE_CHECKING:
    from typing import Unpack

    from djinn_client.transport.connection import OnProgress

T = TypeVar("T")


class Edit(Handle[T]):
    """A handle of an edit, of this session. A fork has the edit, too, under the same id, and removes it separately."""

    def remove(self) -> T:
        """Ends the edit. Positions that it has changed stay changed. The second time it does nothing. Raises
        SessionBusy."""
        return self._run(unsteer(self._session, self))


class Capture(Generic[T]):
    """Points to look at: each `run` is one call of the session."""

    def __init__(self, session: SessionCalls, points: str | Iterable[str], run: Callable[[Steps[Cache]], T]) -> None:
        self.points = named(points)
        if not self.points:
            raise InvalidRequest("name the points to capture", field="points")
        self._session = session
        self._run = run

    def run(
        self,
        prompt: str | Iterable[int] | None = None,
        *,
        on_progress: OnProgress | None = None,
        **options: Unpack[GenerateOptions],
    ) -> T:
        """Extends the session by the prompt, as `generate` does and with its options; `max_tokens` is 0 if it is not
        given: nothing is generated. The Cache has all positions that the call computes: the prompt's and those of all
        generated tokens but the last; without a prompt it has the session's last one, at which the next token is
        chosen. Positions that new edits change are computed again, and are in it too. The call does not stop at
        breakpoints: to go back to a boundary between two blocks that it has captured, see Cache.resume_point.
        `on_progress` is told how many bytes of the activations have come.

        Raises what `generate` raises, SessionStateError while the session has functions (`intervene`), and
        InvalidRequest for points that the model does not have, and for more than a call may capture (1 GiB)."""
        return self._run(capture(self._session, self.points, prompt, options, on_progress))


def named(points: str | Iterable[str]) -> list[str]:
    return [points] if isinstance(points, str) else list(points)


def steer(
    session: SessionCalls,
    point: str | Iterable[str],
    vector: Any = None,
    *,
    op: Op = "add",
    scale: float = 1.0,
    low: float | None = None,
    high: float | None = None,
    positions: Iterable[int] | None = None,
) -> Steps[int]:
    """Changes the session's activations `a` at a point, or at several, until the edit is removed:

        add             a + scale·v                          v: `vector`
        scale           a·scale                              takes no vector
        project_out     a - scale·(a·v̂)v̂                     v̂: v of length 1
        replace         v
        clamp           a·v̂ is brought between `low` and `high`, either of which may be None

    Without `positions`, the edit applies from now on: where the next token is chosen, and at all later positions. With
    `positions`, ascending, it applies there only; positions that have been computed already are computed again, with
    all later ones, when the session next runs. `vector` is [width], or a row for each of the positions: a torch tensor
    on any device, a numpy array or a sequence of numbers, in any dtype (the arithmetic is in float32, and rounded
    once). `point`: see djinn.points; "blocks.14" is what block 14 gives, and "blocks.*" stands for all blocks.

    An edit is data and belongs to the session: forks have it, and it survives restarts. Several at one point apply
    in the order in which they were made.

    Raises InvalidRequest for a point that the model has not, a vector of another width, one with NaN or infinities
    (which may only replace something: see docs/guide/whitebox.md), or one that is larger than a call can carry
    (15 MiB); SessionBusy, QuotaExceeded, Retry."""
    values = Values() if vector is None else values_of(vector)
    request = build(
        AddEdit,
        session=session.info.id,
        points=named(point),
        op=op,
        scale=_number(scale),
        low=None if low is None else _number(low),
        high=None if high is None else _number(high),
        positions=None if positions is None else positions_of(positions),
        rows=values.rows,
        dtype=values.dtype,
        values=values.data,
    )
    return (yield from session.call(request, EditAdded)).message.edit


def patch(
    session: SessionCalls, activation: Any, point: str | None = None, *, positions: Iterable[int] | None = None
) -> Steps[int]:
    """Replaces activations by others: steer with op="replace".

    An activation from a Cache knows its point and its positions: `t.patch(cache["blocks.9"], positions=[5])` takes
    position 5 of it, and puts it at position 5 of this session; without `positions`, all that there are. Any other
    tensor or array, [positions, width], needs the point and the positions: also a slice of an activation, to put it
    elsewhere: `t.patch(cache["blocks.9"][:, 5:6], "blocks.9", positions=[7])`.

    Raises what `steer` raises."""
    name, wanted = point, None if positions is None else positions_of(positions)
    if hasattr(activation, "point"):
        name = point or activation.point
        there = range(activation.first, activation.first + activation.shape[1])
        wanted = list(there) if wanted is None else wanted
        activation = activation[0, [_row(position, there) for position in wanted]]
    if name is None:
        raise InvalidRequest(
            "these values do not say where they are from: name the point that they replace, patch(values, point, "
            "positions=…). (What is sliced or computed from a captured activation knows nothing of it.)",
            field="point",
        )
    return (yield from steer(session, name, activation, op="replace", positions=wanted))


def unsteer(session: SessionCalls, edit: Edit[Any] | int | None = None) -> Steps[None]:
    """Ends this edit, or the one with this id; None: all. Positions that it has changed stay changed, as they are
    in the session's KV, until `truncate` removes them. Raises SessionBusy."""
    number = edit.id if isinstance(edit, Edit) else edit
    request = build(EndEdits, session=session.info.id, edits=None if number is None else [number])
    yield from session.call(request, Done)


def edits(session: SessionCalls) -> Steps[list[EditInfo]]:
    """The edits of the session. Removed ones are among them if they have changed positions that are still there."""
    return (yield from session.call(build(ListEdits, session=session.info.id), Edits)).message.edits


def capture(
    session: SessionCalls,
    points: Sequence[str],
    prompt: str | Iterable[int] | None,
    options: GenerateOptions,
    on_progress: OnProgress | None = None,
) -> Steps[Cache]:
    if session.interventions:
        raise SessionStateError(
            "the session has functions (intervene), which a call that captures does not run: remove them first, or "
            "capture in a session without them",
            field="capture",
        )
    expect_arrays("capture")
    request = generate_request(session.info.id, prompt, {"max_tokens": 0, **options}, stream=False)
    request.capture = list(points)
    answer = yield from session.call(request, Generated, on_progress)
    if answer.message.captured is None and answer.message.finish_reason == "cancelled":
        raise Cancelled("the call was ended, or the session closed, by another client: nothing was captured")
    captured, memory = mapped(answer.message, answer.fds)
    return Cache(captured, memory, answer.message, (yield from session.points()))


def _number(value: Any) -> float:
    """The value as a float; it may be a tensor or an array with one element."""
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise InvalidRequest(f"{value!r} is no number", field="scale") from error


def _row(position: int, there: range) -> int:
    if position not in there:
        raise InvalidRequest(
            f"position {position} was not captured: there are {there.start} to {there.stop - 1}", field="positions"
        )
    return position - there.start
