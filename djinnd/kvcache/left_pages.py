"""The pages that sessions have left when they left the device."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

from djinnd.kvcache.prefixes import Key


class Left(NamedTuple):
    """The pages of a session that has left the device. Those of its first `tokens` tokens held their KV, and the last
    `staged` ones what its stage had brought (Session.left_stage)."""

    keys: list[Key]
    tokens: int
    back_at: float = 0.0  # when it was expected back, as it left; 0: nobody knew
    staged: int = 0


class LeftPages:
    """Of each session whose pages are known. `key in`: some session has left that page."""

    def __init__(self) -> None:
        self._left: dict[str, Left] = {}
        self._sessions: dict[Key, int] = {}  # that have left a page
        self._back_at: dict[Key, float] = {}  # of the last who left it and is expected

    def get(self, session: str) -> Left | None:
        return self._left.get(session)

    def remember(self, session: str, left: Left) -> None:
        self.forget(session)
        self._left[session] = left
        for key in left.keys:
            self._sessions[key] = self._sessions.get(key, 0) + 1
        if left.back_at:
            self._back_at.update(dict.fromkeys(left.keys, left.back_at))

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
        if left.back_at:
            for key in left.keys:
                if self._back_at.get(key) == left.back_at:
                    del self._back_at[key]

    def expect(self, session: str, back_at: float) -> None:
        """Where nothing is known of it, nothing happens."""
        left = self._left.get(session)
        if left is not None:
            self.remember(session, left._replace(back_at=back_at))

    def wanted_at(self, key: Key) -> float:
        """When somebody who has left the page is expected back; inf: nobody is."""
        return self._back_at.get(key, math.inf)

    def __contains__(self, key: object) -> bool:
        return key in self._sessions

    def check_integrity(self) -> None:
        counted = Counter(key for left in self._left.values() for key in left.keys)
        assert self._sessions == counted, "pages that sessions have left are counted otherwise"
        assert self._back_at.keys() <= counted.keys(), "somebody is expected back for a page that nobody has left"
