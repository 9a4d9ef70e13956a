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
        self._sessions: Counter[Key] = Counter()  # that have left a page

    def get(self, session: str) -> Left | None:
        return self._left.get(session)

    def remember(self, session: str, left: Left) -> None:
        self.forget(session)
        self._left[session] = left
        self._sessions.update(left.keys)

    def forget(self, session: str) -> None:
        """Where nothing is known of it, nothing happens."""
        left = self._left.pop(session, None)
        if left is not None:
            self._sessions.subtract(left.keys)
            for key in left.keys:
                if not self._sessions[key]:
                    del self._sessions[key]

    def __contains__(self, key: object) -> bool:
        return key in self._sessions

    def check_integrity(self) -> None:
        counted = Counter(key for left in self._left.values() for key in left.keys)
        assert self._sessions == counted, "pages that sessions have left are counted otherwise"
