"""Ageing: nobody starves, whatever its class.

Once in `after` seconds, the session of a model that has gone longest without a row comes before all others, if that is
`after` seconds or more, and stays there for ROWS rows, so that bringing its pages pays. While pages are short, rows
that read what it would lose by leaving do not count, or a long prompt would never come to its end. With k sessions that
have waited longer, a session has its next row within (k + 1) * `after` seconds, and the time that their pages and such
prompts take.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from djinnd.core.session import Session

ROWS = 16


class Ageing:
    """Knows the active sessions of one model, longest without a row first."""

    def __init__(self, after: float) -> None:
        self.after = after
        self._waiting: OrderedDict[str, Session] = OrderedDict()
        self._first: Session | None = None
        self._rows = 0  # that it still has coming as the first
        self._chosen_at = -math.inf

    def joined(self, session: Session, now: float) -> None:
        session.row_at = now
        self._waiting[session.id] = session

    def left(self, session: Session) -> None:
        self._waiting.pop(session.id, None)
        if session is self._first:
            self._first = None

    def served(self, sessions: Iterable[Session], now: float, free: Session | None = None) -> None:
        """They have a row in the step that begins now, `free` one that does not count."""
        to_the_end, first = self._waiting.move_to_end, self._first
        for session in sessions:
            session.row_at = now
            to_the_end(session.id)
            if session is first and session is not free:
                self._rows -= 1
                if not self._rows:
                    self._first = None

    def first(self, now: float) -> Session | None:
        """Who comes before all others, if anybody does."""
        if self._first is None and now - self._chosen_at >= self.after and self._waiting:
            oldest = next(iter(self._waiting.values()))
            if now - oldest.row_at >= self.after:
                self._first, self._rows, self._chosen_at = oldest, ROWS, now
        return self._first

    @property
    def chosen(self) -> Session | None:
        """Who `first` has said last, if it is in line still."""
        return self._first

    def __iter__(self) -> Iterator[Session]:
        return iter(self._waiting.values())
