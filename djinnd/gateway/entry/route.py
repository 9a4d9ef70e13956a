"""What distinguishes the APIs that the gateway speaks: the shape of their errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from djinnd.gateway.entry.request import HttpRequest
from djinnd.gateway.http.errors import Problem
from djinnd.gateway.http.replies import Reply

Handle = Callable[[HttpRequest], Awaitable[Reply]]


class Api(NamedTuple):
    name: str
    error: Callable[[Problem], bytes]  # the body of a response that refuses


class Route(NamedTuple):
    """`public` routes need no token, and are answered as the gateway's own Unix user."""

    api: Api
    method: str
    path: str  # as starlette writes it
    handle: Handle
    public: bool = False
