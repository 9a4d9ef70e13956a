"""Tokens that the daemon has refused lately. HTTP and sessions of other machines share them: a client that repeats a
refused token reaches the daemon once in a while, not each time."""

from __future__ import annotations

import time
from collections import OrderedDict

from djinn_client.errors import NotAuthenticated

KEPT = 4096  # tokens; the one that was refused first is forgotten
SECONDS = 2.0  # for which a refused token is not asked for again


class RefusedTokens:
    """`count`: how often a token was refused, by the daemon or unasked."""

    def __init__(self) -> None:
        self.count = 0
        self._until: OrderedDict[str, float] = OrderedDict()  # by time.monotonic; the first refused one first

    def check(self, token: str) -> None:
        """Raises NotAuthenticated."""
        if time.monotonic() < self._until.get(token, 0.0):
            self.count += 1
            raise NotAuthenticated("this token is not known, or holds no longer")

    def add(self, token: str) -> None:
        self.count += 1
        self._until[token] = time.monotonic() + SECONDS
        self._until.move_to_end(token)
        if len(self._until) > KEPT:
            self._until.popitem(last=False)
