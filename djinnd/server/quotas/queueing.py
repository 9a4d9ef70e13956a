"""The queue of requests that wait for their first step: its limit, and the time after which to retry a refused
request."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from djinn_client.errors import Busy
from djinnd.server.quotas.rate import Rate

_WINDOW = 10.0  # seconds over which starts are averaged
_SOONEST, _LATEST = 0.1, 30.0  # seconds: shortest and longest time until a refused request is tried again


class Queue:
    """Counts the requests of all users that have had no row in a step yet. A full queue refuses a user that has at
    least an equal share of its places. So one user's requests cannot keep other users out. Callers give the times, in
    seconds."""

    def __init__(self, places: int, at: float) -> None:
        self.places = places
        self._waiting: Counter[int] = Counter()  # by user; never 0
        self._starts = Rate(_WINDOW, at)

    def __len__(self) -> int:
        return self._waiting.total()

    @contextmanager
    def place(self, user: int, at: float) -> Iterator[QueuePlace]:
        """Gives a request a place until it starts or ends. Raises Busy."""
        self._expect_room(user, at)
        self._waiting[user] += 1
        place = QueuePlace(self, user)
        try:
            yield place
        finally:
            place.leave()

    def started(self, at: float) -> None:
        """Counts a started request, for the rate of starts."""
        self._starts.count(1, at)

    def left(self, user: int) -> None:
        self._waiting[user] -= 1
        if not self._waiting[user]:
            del self._waiting[user]

    def _expect_room(self, user: int, at: float) -> None:
        waiting, own = len(self), self._waiting[user]
        users = len(self._waiting.keys() | {user})
        if waiting < self.places or own < self.places / users:
            return
        retry_s = self._retry_s(at)
        raise Busy(
            f"{waiting:,} requests wait for their first step, {own:,} of them yours, and limits.queue is "
            f"{self.places:,}: try again in {retry_s:g} s",
            waiting=waiting,
            own=own,
            limit=self.places,
            retry_s=retry_s,
        )

    def _retry_s(self, at: float) -> float:
        """Seconds until half of the waiting requests have probably started. Then the queue is not empty yet, and has
        room for many of the refused requests."""
        rate = self._starts.per_second(at)
        seconds = len(self) / 2 / rate if rate else math.inf
        return round(min(max(seconds, _SOONEST), _LATEST), 3)


class QueuePlace:
    """The place of one request. It is given up once."""

    def __init__(self, queue: Queue, user: int) -> None:
        self._queue: Queue | None = queue
        self._user = user

    def started(self, at: float) -> None:
        """Called when the request has its first row in a step."""
        if self._queue is not None:
            self._queue.started(at)
            self.leave()

    def leave(self) -> None:
        """Gives the place up. Does nothing the second time."""
        queue, self._queue = self._queue, None
        if queue is not None:
            queue.left(self._user)
