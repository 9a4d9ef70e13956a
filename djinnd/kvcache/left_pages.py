"""The pages that sessions have left when they left the device."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from djinnd.kvcache.prefixes import Key


class Left(NamedTuple):
    """The pages of a session that has left the device, which held the KV of its first `tokens` tokens."""

    keys: list[Key]
    tokens: int


class LeftPages:
    """Of each session whose pages are known. `key in`: some session has left that page."""

    def __init__(self) -> None:
        self._left: dict[str, Left] = {}
        self._sessions: dict[Key, int] = {}  # that have left a page

    def get(self, session: str) -> Left | None:
        return self._left.get(session)

    def remember(self, session: str, left: Left) -> None:
        self.forget(session)
        self._left[session] = left
        for key in left.keys:
            self._sessions[key] = self._sessions.get(key, 0) + 1

    def forget(self, session: str) -> None:
        """Where nothing is known of it, nothing happens."""
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

    def __contains__(self, key: object) -> bool:
        return key in self._sessions

    def check_integrity(self) -> None:
        counted = Counter(key for left in self._left.values() for key in left.keys)
        assert self._sessions == counted, "pages that sessions have left are counted otherwise"
