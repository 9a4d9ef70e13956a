"""Calls as steps: generators that do the work and yield when they have to wait. The blocking and the asyncio client
differ only in how they wait. (psycopg 3 does the same in its `generators` and `waiting`.)

Between two steps everything is consistent. A caller that cannot wait any longer (Ctrl-C, a cancelled task) closes the
generator, and the steps give up the request in flight. An exception inside a step leaves the connection in an unknown
state, so the connection is closed.
"""

from __future__ import annotations

import inspect
import select
import time
from collections.abc import Callable, Generator
from functools import update_wrapper
from typing import Any, Concatenate, Literal, NamedTuple, ParamSpec, Protocol, TypeAlias, TypeVar

C = TypeVar("C", covariant=True)
P = ParamSpec("P")
T = TypeVar("T")

PAUSE_S = 0.005


class Wait(NamedTuple):
    """The event that the steps need next: `fd` can be read or written, or `seconds` are over. A pause without `seconds`
    takes PAUSE_S."""

    what: Literal["read", "write", "pause"]
    fd: int = -1
    seconds: float | None = None


Steps: TypeAlias = Generator[Wait, None, T]


class HasCalls(Protocol[C]):
    """A client: it runs the steps of its calls, and adds nothing."""

    @property
    def _calls(self) -> C: ...


def blocking(steps: Callable[Concatenate[C, P], Steps[T]]) -> Callable[Concatenate[HasCalls[C], P], T]:
    """The method of a blocking client that runs these steps and returns what they return."""

    def call(client: HasCalls[C], /, *args: P.args, **options: P.kwargs) -> T:
        return run(steps(client._calls, *args, **options))

    describe(call, steps)
    return call


def describe(call: Callable[..., Any], steps: Callable[..., Any], returned: str = "") -> None:
    """Gives the call the name, docstring and parameters of the steps, as `help` and notebooks show them. `returned` is
    the annotation of its result; "" takes that of the steps."""
    update_wrapper(call, steps)
    told = inspect.signature(steps)
    returned = returned or str(told.return_annotation).removeprefix("Steps[").removesuffix("]")
    found: Any = call  # mypy knows no such attribute of a function
    found.__signature__ = told.replace(return_annotation=returned)


def run(steps: Steps[T], patience_s: float | None = None) -> T:
    """Runs the steps to their end in this thread and returns what they return.

    Raises TimeoutError where they still wait after `patience_s`.
    """
    deadline = None if patience_s is None else time.monotonic() + patience_s
    try:
        while True:
            _wait(next(steps), deadline)
    except StopIteration as end:
        result: T = end.value
        return result
    finally:
        steps.close()


def _wait(wait: Wait, deadline: float | None) -> None:
    left_s = None if deadline is None else deadline - time.monotonic()
    if left_s is not None and left_s <= 0:
        raise TimeoutError
    if wait.what == "pause":
        time.sleep(PAUSE_S if wait.seconds is None else wait.seconds)
        return
    if wait.seconds is not None:
        left_s = wait.seconds if left_s is None else min(left_s, wait.seconds)
    poll = select.poll()
    poll.register(wait.fd, select.POLLIN if wait.what == "read" else select.POLLOUT)
    poll.poll(None if left_s is None else left_s * 1000)
