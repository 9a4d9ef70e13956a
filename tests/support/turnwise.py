"""A real engine in a thread whose loop goes round when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from djinnd.messages import ToEngine
from tests.support.whitebox import WhiteBoxEngine

_PATIENCE = 0.0005  # seconds that a turn waits for what threads do, where it would wait


class Turnwise(WhiteBoxEngine):
    """Between two turns of `by_turns` the test may look at what is the engine's, and change it."""

    def __init__(self) -> None:
        self._may_go, self._is_parked = threading.Semaphore(0), threading.Semaphore(0)
        self._is_free = True
        super().__init__()
        self._receive = self.channel.receive
        self.channel.receive = self._gated  # type: ignore[method-assign]

    def _gated(self, timeout: float) -> list[ToEngine]:
        if not self._is_free:
            self._is_parked.release()
            self._may_go.acquire()
        return self._receive(min(timeout, _PATIENCE))

    @contextmanager
    def by_turns(self) -> Iterator[None]:
        self._is_free = False
        self._is_parked.acquire()
        try:
            yield
        finally:
            self._is_free = True
            self._may_go.release()

    def turn(self) -> None:
        """Of the engine's loop; it has all messages that were sent before."""
        self._may_go.release()
        self._is_parked.acquire()

    def _serve(self) -> None:
        super()._serve()
        self._is_parked.release()  # it has failed: whoever waits for a turn sees `error`
