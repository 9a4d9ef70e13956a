"""How the daemon is asked to stop: once to drain, twice to end at once. A restart drains, and then continues as its
successor.

    running ──signal──► draining ──signal──► ending at once
       └────restart───► draining for a successor ──signal──► draining
                           └─decided─► leaving for it ──signal──► the successor is asked to stop

SIGHUP asks it to read its configuration again, which it does while it is running.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Literal

log = logging.getLogger("djinnd.server")

SIGNALS = (signal.SIGTERM, signal.SIGINT)
_HEARD = (*SIGNALS, signal.SIGHUP)

Restart = Literal["warm", "cold"]  # warm: the weights and pages of models stay in the arena


def leave_signals_to_the_loop() -> None:
    """Called by each other thread of this process when it begins. A signal that the loop's thread blocks goes to any
    thread that does not, also to one that has been joined and has not quite ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)


class Stopping:
    """The requests to stop, restart or reload, and the decision between an end and a successor."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.reload = asyncio.Event()  # cleared before the reload
        self.restart: Restart | None = None  # after draining; None: the daemon ends
        self._is_leaving = False

    def ask(self) -> None:
        if self._is_leaving:  # the signal came a moment before it was blocked
            signal.raise_signal(signal.SIGTERM)
        elif self.restart is not None:
            self.restart = None
            log.info("restart_given_up reason=a stop was requested")
        else:
            (self.now if self.asked.is_set() else self.asked).set()

    def ask_restart(self, restart: Restart) -> None:
        assert not self.asked.is_set()
        self.restart = restart
        self.asked.set()

    def decide(self) -> None:
        """Makes the decision about a successor final, before anything is left for it. If there is one, signals are
        blocked: they stay pending for the successor, as pending signals survive an exec."""
        if self.restart is not None:
            self._is_leaving = True
            signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(initializer=leave_signals_to_the_loop))
        handlers = dict.fromkeys(SIGNALS, self.ask) | {signal.SIGHUP: self.reload.set}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
        try:
            yield
        finally:
            for number in handlers:
                loop.remove_signal_handler(number)
