"""A route, and the API that it belongs to."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.http.errors import Problem
from djinnd.gateway.http.replies import Reply

Handle = Callable[[HttpRequest], Awaitable[Reply]]


class Api(NamedTuple):
    """An API has its own shape of an error."""

    error: Callable[[Problem], bytes]  # writes the body of a response that refuses
    failed: Callable[[Problem], bytes]  # writes the last bytes of a stream that cannot go on


class Route(NamedTuple):
    """`public` routes need no token, and are answered as the gateway's own Unix user."""

    api: Api
    method: str
    path: str  # as starlette writes it
    handle: Handle
    public: bool = False
