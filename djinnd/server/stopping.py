"""How the daemon is asked to stop: once to drain, twice to end at once. Or to drain, and to go on as its successor.

running ──signal──► draining ──signal──► ending at once
   └────restart───► draining for a successor ──signal──► draining
                       └─decided─► leaving for it ──signal──► which is asked to stop

SIGHUP asks it for something else, which it comes to while it is running: to read its configuration again.
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

Restart = Literal["warm", "cold"]  # warm: the blocks of models stay in the arena


def leave_signals_to_the_loop() -> None:
    """For each other thread of this process, when it begins: a signal that the loop's thread blocks goes to any that
    does not, also to one that has been joined and has not quite ended."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)


class Stopping:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.reload = asyncio.Event()  # who does it clears it first
        self.restart: Restart | None = None  # what follows when the daemon has drained; None: nothing
        self._is_leaving = False

    def ask(self) -> None:
        if self._is_leaving:  # it was heard a moment before
            signal.raise_signal(signal.SIGTERM)
        elif self.restart is not None:
            self.restart = None
            log.info("restart_given_up reason=the daemon is to stop")
        else:
            (self.now if self.asked.is_set() else self.asked).set()

    def ask_restart(self, restart: Restart) -> None:
        assert not self.asked.is_set()
        self.restart = restart
        self.asked.set()

    def decide(self) -> None:
        """Whether there is a successor does not change any more, as things are left for it from now on, or are not.
        Signals are blocked where there is one: they wait for its turn, which a process keeps when it executes another
        program."""
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
