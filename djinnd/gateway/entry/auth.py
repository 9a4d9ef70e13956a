"""Which token a request brings, and which requests need none.

A request without a token acts as the gateway's own Unix user. That is allowed only where the configuration says so,
only from this machine, and only where no web page and no proxy can be behind it: a page of a stranger's that a browser
on this machine shows has an Origin, one that has its name resolve to 127.0.0.1 has a Host of its own, and a proxy says
for whom it forwards.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from djinnd.gateway.http.addresses import is_local, is_loopback
from djinnd.gateway.http.errors import HttpError, unauthorised

MAX_TOKEN = 256  # characters; the daemon's have 47
_FORWARDED = ("forwarded", "x-forwarded-for", "x-real-ip")


def token_of(headers: Mapping[str, str]) -> str:
    """From `Authorization: Bearer`, `x-api-key` or `api-key`; "" where there is none. Raises HttpError."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    token = given.strip() if scheme.lower() == "bearer" else ""
    token = token or headers.get("x-api-key", "") or headers.get("api-key", "")
    if len(token) > MAX_TOKEN or not token.isascii():
        raise unauthorised("this is no token of djinnd's")
    return token


def is_djinnd_token(token: str) -> bool:
    """Other texts are what programs send that must send something."""
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
