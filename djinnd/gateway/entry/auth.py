"""Reads a request's token, and checks requests that come without one.

A request without a token acts as the gateway's own Unix user. The configuration must allow that, and the request must
come from this machine, neither through a proxy nor from a foreign web page. A page in a browser of this machine sends
its Origin. A page whose name resolves to 127.0.0.1 sends that name as Host. A proxy sends the address for which it
forwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from djinnd.gateway.http.addresses import is_local, is_loopback
from djinnd.gateway.http.errors import HttpError, unauthorised

MAX_TOKEN = 256  # characters; the daemon's have 47
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


def token_of(headers: Mapping[str, str]) -> str:
    """The token from `Authorization: Bearer`, `x-api-key` or `api-key`; "" if there is none. Raises HttpError."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    token = given.strip() if scheme.lower() == "bearer" else ""
    token = token or headers.get("x-api-key", "") or headers.get("api-key", "")
    if len(token) > MAX_TOKEN or not token.isascii():
        raise unauthorised("this is no token of djinnd's")
    return token


def is_djinnd_token(token: str) -> bool:
    """False for the placeholders of programs that must send a key."""
    return token.startswith("djn_")


def expect_own_machine(client: str | None, headers: Mapping[str, str], origins: Collection[str]) -> None:
    """Raises HttpError unless a request without a token may come in. `client`: the peer's address; None: a Unix
    socket's peer, of the gateway's own user."""
    if client is not None and not is_loopback(client):
        raise unauthorised("this request needs a token: Authorization: Bearer djn_…")
    if any(name in headers for name in _FORWARDED):
        raise unauthorised("this request came through a proxy and needs a token: Authorization: Bearer djn_…")
    origin = headers.get("origin")
    if origin is not None and origin not in origins and not is_local(origin.partition("://")[2]):
        raise HttpError(403, f"pages of {origin[:100]} may not call this gateway: http.cors can name them")
    if client is not None and not is_local(headers.get("host", "")):
        raise unauthorised("a request without a token must call this machine localhost or 127.0.0.1")
