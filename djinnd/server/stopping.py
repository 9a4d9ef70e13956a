"""How the daemon is asked to stop: once to drain, twice to end at once. Or to drain, and to go on as its successor.

running ──signal──► draining ──signal──► ending at once
   └────restart───► draining for a successor ──signal──► draining

SIGHUP asks it for something else, which it comes to while it is running: to read its configuration again.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

log = logging.getLogger("djinnd.server")

SIGNALS = (signal.SIGTERM, signal.SIGINT)

Restart = Literal["warm", "cold"]  # warm: the blocks of models stay in the arena


class Stopping:
    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.now = asyncio.Event()
        self.reload = asyncio.Event()  # who does it clears it first
        self.restart: Restart | None = None  # what follows when the daemon has drained; None: nothing

    def ask(self) -> None:
        if self.restart is not None:
            self.restart = None
            log.info("restart_given_up reason=the daemon is to stop")
        else:
            (self.now if self.asked.is_set() else self.asked).set()

    def ask_restart(self, restart: Restart) -> None:
        assert not self.asked.is_set()
        self.restart = restart
        self.asked.set()

    @contextmanager
    def by_signals(self) -> Iterator[None]:
        """On leaving for a successor, signals are blocked: one that comes in between waits for the successor's turn,
        which a process keeps when it executes another program."""
        loop = asyncio.get_running_loop()
        handlers = dict.fromkeys(SIGNALS, self.ask) | {signal.SIGHUP: self.reload.set}
        for number, handler in handlers.items():
            loop.add_signal_handler(number, handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, handlers)
        try:
            yield
        finally:
            if self.restart is not None:
                signal.pthread_sigmask(signal.SIG_BLOCK, handlers)
            for number in handlers:
                loop.remove_signal_handler(number)
