"""Handles: each stands for an edit, a breakpoint or an intervention of a session, and can remove it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar

from djinn_client.session.calls import SessionCalls
from djinn_client.transport.steps import Steps, describe

P = ParamSpec("P")
T = TypeVar("T")


class Handle(Generic[T]):
    """An object of a session, by its id. T is the result of running steps without a result: None, or an awaitable."""

    def __init__(self, session: SessionCalls, id: int, run: Callable[[Steps[None]], T]) -> None:
        self.id = id
        self._session = session
        self._run = run

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} of {self._session.info.id}>"


H = TypeVar("H", bound=Handle[Any])


def handled(
    handle: type[H],
    run: Callable[[Steps[None]], Any],
    steps: Callable[Concatenate[SessionCalls, P], Steps[int]],
) -> Callable[Concatenate[SessionCalls, P], Steps[H]]:
    """The call that runs these steps and returns a handle of the id that they return. The handle's own calls are run
    by `run`."""

    def call(session: SessionCalls, /, *args: P.args, **options: P.kwargs) -> Steps[H]:
        return handle(session, (yield from steps(session, *args, **options)), run)

    describe(call, steps, f"Steps[{handle.__name__}]")
    return call
