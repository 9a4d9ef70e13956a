"""Admits tokens, and counts what the links of each hold in the gateway."""

from __future__ import annotations

from collections import Counter

from djinn_client.errors import Busy, QuotaExceeded
from djinnd.config import Remote
from djinnd.gateway.daemon.refused_tokens import RefusedTokens
from djinnd.gateway.remote.figures import Figures


class Accounts:
    def __init__(self, limits: Remote, refused: RefusedTokens, figures: Figures) -> None:
        self.limits = limits  # a reload sets it anew
        self.figures = figures
        self._refused = refused
        self._links: Counter[str] = Counter()
        self._bytes: Counter[str] = Counter()

    def open(self, token: str) -> None:
        """Raises NotAuthenticated for a token that the daemon has refused lately; Busy."""
        self._refused.check(token)
        if self._links[token] >= (most := self.limits.connections_per_token):
            raise Busy(f"this token has {most:,} connections from other machines, its limit", retry_s=1.0)
        self._links[token] += 1

    def close(self, token: str) -> None:
        self._links[token] -= 1
        if not self._links[token]:
            del self._links[token]

    def refused(self, token: str) -> None:
        """The daemon does not know the token."""
        self._refused.add(token)

    def charge(self, token: str, nbytes: int) -> None:
        """Raises QuotaExceeded for a token that sends too much at once, Busy if all of them do."""
        mine, limit = self._bytes[token] + nbytes, self.limits.window_bytes_per_token
        if mine > limit:
            raise QuotaExceeded(
                f"this token is sending {mine:,} bytes; the gateway takes {limit:,} at once "
                "(remote.window_bytes_per_token)",
                quota="window_bytes_per_token",
                limit=limit,
                used=mine,
            )
        if self._bytes.total() + nbytes > self.limits.window_bytes:
            raise Busy("the gateway is receiving as much as it may (remote.window_bytes): try again", retry_s=1.0)
        self._bytes[token] = mine
        self.figures.window_bytes += nbytes

    def release(self, token: str, nbytes: int) -> None:
        self._bytes[token] -= nbytes
        self.figures.window_bytes -= nbytes
        if not self._bytes[token]:
            del self._bytes[token]
