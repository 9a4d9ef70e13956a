"""Remembers which pages sessions had when they left the device."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from djinnd.kvcache.prefixes import Key


class Departure(NamedTuple):
    """The pages of a session that has left the device. They hold the KV of its first `tokens` tokens. The last `staged`
    of them also hold KV of its stage (Session.left_stage)."""

    keys: list[Key]
    tokens: int
    back_at: float = 0.0  # when it is expected back, as known when it left; 0: unknown
    staged: int = 0


class DepartedPages:
    """The pages of one model's departed sessions. `key in departed` is True if some session has left that page."""

    def __init__(self) -> None:
        self._left: dict[str, Departure] = {}
        self._sessions: dict[Key, int] = {}  # how many sessions have left each page
        self._back_at: dict[Key, float] = {}  # of the last session that left the page and is expected

    def get(self, session: str) -> Departure | None:
        return self._left.get(session)

    def remember(self, session: str, left: Departure) -> None:
        self.forget(session)
        self._left[session] = left
        for key in left.keys:
            self._sessions[key] = self._sessions.get(key, 0) + 1
        if left.back_at:
            self._back_at.update(dict.fromkeys(left.keys, left.back_at))

    def forget(self, session: str) -> None:
        """Forgets the session's pages. No effect if there are none."""
        left = self._left.pop(session, None)
        if left is None:
            return
        sessions = self._sessions
        for key in left.keys:
            count = sessions[key]
            if count == 1:
                del sessions[key]
            else:
                sessions[key] = count - 1
        if left.back_at:
            for key in left.keys:
                if self._back_at.get(key) == left.back_at:
                    del self._back_at[key]

    def expect(self, session: str, back_at: float) -> None:
        """Sets when the session is expected back. No effect if it has left no pages."""
        left = self._left.get(session)
        if left is not None:
            self.remember(session, left._replace(back_at=back_at))

    def wanted_at(self, key: Key) -> float:
        """When a session that has left the page is expected back; inf if none is."""
        return self._back_at.get(key, math.inf)

    def __contains__(self, key: object) -> bool:
        return key in self._sessions

    def check_integrity(self) -> None:
        counted = Counter(key for left in self._left.values() for key in left.keys)
        assert self._sessions == counted, "the count of sessions by page is wrong"
        assert self._back_at.keys() <= counted.keys(), "a session is expected back for a page that no session has left"
