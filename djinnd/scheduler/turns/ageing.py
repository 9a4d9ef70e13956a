"""Ageing: no session starves, whatever its class.

At most once in `after` seconds, ageing puts one session of a model before all others: the one that has gone longest
without a row, if that is at least `after` seconds. It stays first for some rows, so that bringing its pages back pays.

While pages are short, rows of a prompt whose KV would be lost if the session left do not count. Otherwise
a long prompt would never be finished. With k sessions that have waited longer, a session has its next row within (k +
1) * `after` seconds, plus the time that their pages and such prompts take.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Iterator

from djinnd.core.session import Session
from djinnd.scheduler.tuning import FAIRNESS


class Ageing:
    """The active sessions of one model, the longest without a row first."""

    def __init__(self, after: float) -> None:
        self.after = after
        self._waiting: OrderedDict[str, Session] = OrderedDict()
        self._first: Session | None = None
        self._rows = 0  # rows left as the first
        self._chosen_at = -math.inf

    def joined(self, session: Session, now: float) -> None:
        session.row_at = now
        self._waiting[session.id] = session

    def left(self, session: Session) -> None:
        self._waiting.pop(session.id, None)
        if session is self._first:
            self._first = None

    def served(self, sessions: Iterable[Session], now: float, free: Session | None = None) -> None:
        """Notes that these sessions have a row in the step that begins now. The row of `free` does not
        count."""
        to_the_end, first = self._waiting.move_to_end, self._first
        for session in sessions:
            session.row_at = now
            to_the_end(session.id)
            if session is first and session is not free:
                self._rows -= 1
                if not self._rows:
                    self._first = None

    def first(self, now: float) -> Session | None:
        """The session that comes before all others, or None."""
        if self._first is None and now - self._chosen_at >= self.after and self._waiting:
            oldest = next(iter(self._waiting.values()))
            if now - oldest.row_at >= self.after:
                self._first, self._rows, self._chosen_at = oldest, FAIRNESS.aged_rows, now
        return self._first

    @property
    def chosen(self) -> Session | None:
        """The result of the last call of `first`, unless that session has left the queue."""
        return self._first

    def __iter__(self) -> Iterator[Session]:
        return iter(self._waiting.values())
