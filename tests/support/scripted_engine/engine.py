"""A scripted engine for tests of the server: a real process that speaks djinnd.messages over its end of a socket pair.

It computes nothing. The token at position p of any session is `story[p % len(story)]`, so a test knows the tokens of
every session. An edit of position p - 1 shifts that token by the edit's number. It also shifts the captured
activations, which have the position in all columns. The engine stops before blocks like a real one. Other behaviour is
scripted in a JSON file (`Script`), by the first token of a prompt, so that one tenant can have trouble beside others
without. With `gate`, a FIFO, the engine runs a step for each byte that a test writes into it; otherwise it does not
wait.
"""

from __future__ import annotations

import os
import select
import socket
import time

from djinnd import messages
from tests.support.scripted_engine.channel import Channel
from tests.support.scripted_engine.loads import Loads
from tests.support.scripted_engine.models import Models
from tests.support.scripted_engine.reports import Reports
from tests.support.scripted_engine.runs import Runs
from tests.support.scripted_engine.script import Script
from tests.support.scripted_engine.session import Session
from tests.support.scripted_engine.sessions import Sessions
from tests.support.scripted_engine.tracing import Tracing


class Engine:
    """The loop. Each part has methods for some kinds of messages: `on_` and the kind's name."""

    def __init__(self, sock: socket.socket, script: Script, device: str, memory: int) -> None:
        self._script = script
        self._device = device
        self._channel = Channel(sock)
        sessions: dict[str, Session] = {}  # by name
        self._models = Models(self._channel, memory)
        self._loads = Loads(script, self._channel, self._models, sessions)
        self._runs = Runs(script, self._channel, self._models, sessions)
        self._tracing = Tracing(self._channel)
        reports = Reports(script, self._channel, self._models, sessions, self._runs)
        others = Sessions(self._channel, self._models, sessions)
        self._parts = (self, self._models, self._loads, self._runs, self._tracing, reports, others)
        self._is_stopping = False
        self._gate = os.open(script.gate, os.O_RDONLY | os.O_NONBLOCK) if script.gate else -1
        self._alive_at = 0.0

    def serve(self) -> None:
        sock, gate = self._channel.socket, self._gate
        self._channel.send(messages.Ready(self._device, "a script", self._models.budget, os.getpid()))
        while not self._is_stopping:
            busy = self._runs.is_busy
            watched = [sock] + ([gate] if busy and gate >= 0 else [])
            timeout = 0.0 if busy and gate < 0 else self._script.alive_s
            readable, _, _ = select.select(watched, [], [], timeout)
            if sock in readable:
                for message in self._channel.receive():
                    self._handle(message)
                busy = self._runs.is_busy  # otherwise a step for which a test has written a byte would be lost
            if busy and (gate < 0 or (gate in readable and os.read(gate, 1))):
                self._tracing.note_step()
                self._runs.step()
            self._tracing.turn()
            self._loads.begin_late()
            if time.monotonic() >= self._alive_at:
                self._alive_at = time.monotonic() + self._script.alive_s
                self._channel.send(messages.Alive())

    def _handle(self, message: messages.ToEngine) -> None:
        name = f"on_{type(message).__name__.lower()}"
        (handle,) = [getattr(part, name) for part in self._parts if hasattr(part, name)]
        handle(message)

    def on_setpolicy(self, message: messages.SetPolicy) -> None:
        """Ignored, because the script decides the schedule."""

    def on_shutdown(self, message: messages.Shutdown) -> None:
        while self._script.on_shutdown == "hang":
            time.sleep(1)
        if message.keep_pages:
            self._loads.keep_pages()
        if self._script.on_shutdown == "linger":
            self._channel.socket.shutdown(socket.SHUT_WR)
            time.sleep(3600)
        self._is_stopping = True
