"""A real engine on a thread, with a loop that turns when the test says so."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from djinnd.messages import ToEngine
from tests.support.whitebox import WhiteBoxEngine

_PATIENCE = 0.0005  # seconds that a turn waits for threads, where the loop would block


class Turnwise(WhiteBoxEngine):
    """Between two turns of `by_turns`, the test may read and change the engine's state."""

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
        """One turn of the engine's loop. It receives all messages that were sent before."""
        self._may_go.release()
        self._is_parked.acquire()

    def _serve(self) -> None:
        super()._serve()
        self._is_parked.release()  # `serve` has failed, and a test that waits for a turn sees `error`
