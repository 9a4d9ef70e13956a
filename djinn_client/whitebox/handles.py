"""Handles: each stands for an edit, a breakpoint or an intervention of a session, and can remove it."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Concatenate, Generic, ParamSpec, TypeVar

from djinn_client.session.calls import SessionCalls
from djinn_client.transport.steps import Steps

P = ParamSpec("P")
T = TypeVar("T")
H = TypeVar("H")


class Handle(Generic[T]):
    """An object of a session, by its id. T is the result of running steps without a result: None, or an awaitable."""

    def __init__(self, session: SessionCalls, id: int, run: Callable[[Steps[None]], T]) -> None:
        self.id = id
        self._session = session
        self._run = run

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self._session.info.id}>"


def handled(
    handle: Callable[[SessionCalls, int, Callable[[Steps[None]], T]], H],
    run: Callable[[Steps[None]], T],
    steps: Callable[Concatenate[SessionCalls, P], Steps[int]],
) -> Callable[Concatenate[SessionCalls, P], Steps[H]]:
    """The call that runs these steps and returns a handle of the id that they return. `run` runs the handle's own."""

    def call(session: SessionCalls, /, *args: P.args, **options: P.kwargs) -> Steps[H]:
        return handle(session, (yield from steps(session, *args, **options)), run)

    update_wrapper(call, steps)
    return call
