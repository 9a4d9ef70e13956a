"""Looking and changing inside the model, in steps: edits (steer, patch), and captures.

`Session` and `AsyncSession` hand in what runs the steps, and so what `run` and `remove` return: a result, or an
awaitable of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from djinn_client.arguments.options import GenerateOptions, build, generate_request
from djinn_client.errors import Cancelled, InvalidRequest, SessionStateError
from djinn_client.protocol import AddEdit, Done, EditAdded, Edits, EndEdits, Generated, ListEdits
from djinn_client.protocol.fields.edits import EditInfo
from djinn_client.session.calls import SessionSteps
from djinn_client.tensors.arrays import expect_arrays
from djinn_client.tensors.cache import Cache, mapped
from djinn_client.tensors.values import Values, positions_of, values_of
from djinn_client.transport.steps import Steps

if TYPE_CHECKING:
    from typing import Unpack

T = TypeVar("T")


class Edit(Generic[T]):
    """A handle of an edit, of this session. A fork has the edit, too, under the same id; its end there is another."""

    def __init__(self, session: SessionSteps, id: int, run: Callable[[Steps[None]], T]) -> None:
        self.id = id
        self._session = session
        self._run = run

    def remove(self) -> T:
        """Ends the edit. Positions that it has changed stay changed. The second time it does nothing. Raises
        SessionBusy."""
        return self._run(unsteer(self._session, self))

    def __repr__(self) -> str:
        return f"<Edit {self.id} of {self._session.info.id}>"


class Capture(Generic[T]):
    """Points to look at: each `run` is one call of the session."""

    def __init__(self, session: SessionSteps, points: str | Iterable[str], run: Callable[[Steps[Cache]], T]) -> None:
        self.points = named(points)
        if not self.points:
            raise InvalidRequest("name the points that are to be captured", field="points")
        self._session = session
        self._run = run

    def run(self, prompt: str | Iterable[int] | None = None, **options: Unpack[GenerateOptions]) -> T:
        """Extends the session by the prompt, as `generate` does and with its options; `max_tokens` is 0 if it is not
        given: nothing is generated. The Cache has all positions that the call computes: the prompt's and those of all
        generated tokens but the last; without a prompt it has the session's last one, at which the next token is
        chosen. Positions at which edits have just become due are computed again, and are there too. The call does not
        stop at breakpoints: a session goes on from what it captures between two blocks, see Cache.resume_point.

        Raises what `generate` raises, SessionStateError while the session has functions (`intervene`), and
        InvalidRequest for points that the model does not have, and for more than a call may capture (1 GiB)."""
        return self._run(capture(self._session, self.points, prompt, options))


def named(points: str | Iterable[str]) -> list[str]:
    return [points] if isinstance(points, str) else list(points)


def steer(
    session: SessionSteps,
    points: str | Iterable[str],
    vector: Any,
    op: str,
    scale: float,
    low: float | None,
    high: float | None,
    positions: Iterable[int] | None,
) -> Steps[int]:
    """The edit's id."""
    values = Values() if vector is None else values_of(vector)
    request = build(
        AddEdit,
        session=session.info.id,
        points=named(points),
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


def patch(session: SessionSteps, activation: Any, point: str | None, positions: Iterable[int] | None) -> Steps[int]:
    """The edit's id."""
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
    return (yield from steer(session, name, activation, "replace", 1.0, None, None, wanted))


def unsteer(session: SessionSteps, edit: Edit[Any] | int | None) -> Steps[None]:
    number = edit.id if isinstance(edit, Edit) else edit
    request = build(EndEdits, session=session.info.id, edits=None if number is None else [number])
    yield from session.call(request, Done)


def edits(session: SessionSteps) -> Steps[list[EditInfo]]:
    return (yield from session.call(build(ListEdits, session=session.info.id), Edits)).message.edits


def capture(
    session: SessionSteps, points: Sequence[str], prompt: str | Iterable[int] | None, options: GenerateOptions
) -> Steps[Cache]:
    if session.interventions:
        raise SessionStateError(
            "the session has functions (intervene), and a call that captures stops for none: remove them first, or "
            "capture in a session without them",
            field="capture",
        )
    expect_arrays("capture")
    request = generate_request(session.info.id, prompt, {"max_tokens": 0, **options}, stream=False)
    request.capture = list(points)
    answer = yield from session.call(request, Generated)
    if answer.message.captured is None and answer.message.finish_reason == "cancelled":
        raise Cancelled("somebody has ended the call, or closed the session: nothing of it was captured")
    captured, memory = mapped(answer.message, answer.fds)
    return Cache(captured, memory, answer.message, (yield from session.points()))


def _number(value: Any) -> float:
    """Also of a tensor's or an array's one element."""
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
