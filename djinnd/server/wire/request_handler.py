"""Handlers of requests: a method says with `@handles(protocol.AddEdit)` which requests it answers.

A handler is a coroutine. It returns the final reply, in a FinalReply if descriptors go with it. It returns None if it
has nothing to say; then the client receives Done. Or it raises an error, which the client receives.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar

from djinn_client.protocol import Reply, Request
from djinnd.server.wire.call import ClientCall, FinalReply

T = TypeVar("T")
R = TypeVar("R", bound=Request)
A = TypeVar("A", bound=Reply | FinalReply | None)
Method: TypeAlias = Callable[[T, ClientCall, R], Coroutine[Any, Any, A]]
Handler = Callable[[ClientCall, Any], Coroutine[Any, Any, Reply | FinalReply | None]]


class Handling(NamedTuple):
    """The checks that come before a handler.

    - `is_new_work`: refused while the daemon stops.
    - `journal`: "changes": changes something that the journal stores, and is refused if it cannot be written. "grows":
      also makes the journal larger, and is refused at the user's limit. Requests that give room back are always
      allowed.
    """

    kind: type[Request]
    is_new_work: bool
    journal: Literal["", "changes", "grows"]


def handles(
    kind: type[R], *, is_new_work: bool = False, journal: Literal["", "changes", "grows"] = ""
) -> Callable[[Method[T, R, A]], Method[T, R, A]]:
    """Declares a method as the handler of a kind of request. See Handling."""

    def declare(method: Method[T, R, A]) -> Method[T, R, A]:
        method.__dict__["handling"] = Handling(kind, is_new_work, journal)
        return method

    return declare


def handlers_of(part: object) -> Iterator[tuple[Handling, Handler]]:
    """Yields the handlers that the class of an object declares, bound to the object."""
    for name, method in vars(type(part)).items():
        if (handling := getattr(method, "handling", None)) is not None:
            yield handling, getattr(part, name)
