"""The server's end of the socket pair to one engine process, from its first message to its loss.

A Run receives the events of one request to the engine. Exactly one of `finished`, `captured`, `logits`, `exported`,
`failed` and `lost` is the last. Any other request has a future. When the engine is lost, all runs and futures end with
that error in the same turn of the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from djinn_client.errors import DjinnError, EngineLost, ProtocolError, from_code
from djinn_client.protocol import Logprobs
from djinnd import messages
from djinnd.messages import MAX_FRAME, ToEngine
from djinnd.messages.directions import Answer
from djinnd.server.engines.blame import RunProgress, Suspect, blamed_progress
from djinnd.server.system.closer import close_fds
from djinnd.server.wire.connection import FrameConnection

log = logging.getLogger("djinnd.server")

_numbers = itertools.count(1)  # of requests to engines: unique in the daemon's life, across engines


class EngineRun(Protocol):
    """Receives the events of one message that `EngineClient.run` has sent. Times are CLOCK_MONOTONIC. A kind of run
    defines only the methods of events that it gets."""

    @property
    def progress(self) -> RunProgress: ...
    @property
    def suspect(self) -> Suspect: ...
    @property
    def is_urgent(self) -> bool:
        """True if its tokens of a step are sent before the server processes and journals the step's other tokens."""
        ...

    def started(self, at: float, woken: bool) -> None: ...
    def token(self, token: int, logprobs: Logprobs | None, at: float) -> None:
        raise AssertionError(f"a token for a {type(self).__name__}")

    def prompt_scored(self, message: messages.PromptScored) -> None:
        raise AssertionError(f"prompt log probabilities for a {type(self).__name__}")

    def tell(self) -> None:
        """Sends the received tokens now instead of at the end of this turn of the loop."""
        ...

    def finished(self, message: messages.Finished) -> None:
        raise AssertionError(f"a {type(self).__name__} ends otherwise")

    def captured(self, message: messages.Finished, fd: int) -> None:
        """The run is finished and has captured data in a memfd. The descriptor now belongs to the run."""
        raise AssertionError(f"activations for a {type(self).__name__}")

    def logits(self, message: messages.LogitsReady, fd: int) -> None:
        """The logits are in a memfd. The descriptor now belongs to the run."""
        raise AssertionError(f"logits for a {type(self).__name__}")

    def exported(self, message: messages.KvExported, fd: int) -> None:
        """The session's KV is in a memfd. The descriptor now belongs to the run."""
        raise AssertionError(f"KV for a {type(self).__name__}")

    def failed(self, error: DjinnError) -> None: ...
    def lost(self, error: DjinnError, blamed: bool) -> None:
        """The engine is lost, and the run with it. `blamed`: this run may have killed the engine."""
        ...


class EngineEvents(Protocol):
    """Receives the engine's messages that belong to no request."""

    def received(self, engine: EngineClient, message: messages.FromEngine) -> None: ...


class EngineClient:
    """Sends requests to one engine and dispatches its messages. `heard` counts the engine's frames, and stands still
    while the engine is silent. `on_lost` is called once with the suspects of the engine's death, before the requests
    fail. A request that then asks for an engine waits for the next one."""

    def __init__(self, sock: socket.socket, listener: EngineEvents, on_lost: Callable[[list[Suspect]], None]) -> None:
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[messages.Ready] = loop.create_future()
        self.lost: asyncio.Future[DjinnError] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()  # done when the stream has ended
        self.heard = 0
        self._tenants: dict[int, messages.TenantLimits] = {}  # as last sent to the engine
        self._listener = listener
        self._on_lost = on_lost
        self._runs: dict[int, EngineRun] = {}
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._loads: dict[int, str] = {}  # by number of their Load: models that are being loaded
        self._connection = FrameConnection(sock, self, MAX_FRAME, output_limit=1 << 40, accept_fds=True)

    def send(self, message: ToEngine, fds: Sequence[int] = ()) -> None:
        """Sends a message. Does nothing if the engine is lost: its requests have failed, and the next engine receives
        the whole state. The descriptors belong to the connection, which closes them."""
        self._connection.send(messages.encode(message, len(fds)), fds)

    def flush(self) -> None:
        """Sends queued messages now instead of at the end of this turn of the loop."""
        self._connection.flush()

    def set_tenants(self, limits: Iterable[messages.TenantLimits]) -> None:
        """Sends the limits of tenants that have changed. A new engine assumes that no tenant has limits."""
        news = [each for each in limits if self._tenants.get(each.tenant, messages.TenantLimits(each.tenant)) != each]
        if news:
            self._tenants.update((each.tenant, each) for each in news)
            self.send(messages.SetTenants(news))

    def run(
        self,
        run: EngineRun,
        kind: type[messages.Run | messages.ExportKv | messages.ImportKv] = messages.Run,
        fds: Sequence[int] = (),
        **fields: Any,
    ) -> int:
        """Sends a message of the given kind and returns its number. Its events go to `run`. The descriptors belong to
        the connection, which closes them."""
        assert not self.lost.done()
        number = next(_numbers)
        self._runs[number] = run
        self.send(kind(number, **fields), fds)
        return number

    async def call(self, kind: type[messages.EngineCall[Answer]], fds: Sequence[int] = (), **fields: Any) -> Answer:
        """Sends a request and returns the engine's answer. The engine is alive when this returns. The descriptors
        belong to the connection, which closes them. Raises the engine's error, or EngineLost."""
        number = next(_numbers)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        if kind is messages.Load:
            self._loads[number] = fields["model"]
        try:
            self.send(kind(number, **fields), fds)
            await asyncio.wait([future, self.lost], return_when=asyncio.FIRST_COMPLETED)
            if self.lost.done():
                raise self.lost.result()
            answer: Answer = future.result()
            return answer
        finally:
            del self._calls[number]
            self._loads.pop(number, None)

    @property
    def runs(self) -> int:
        return len(self._runs)

    def lose(self, error: DjinnError) -> None:
        """Declares the engine lost: its requests fail, and its further messages are ignored. Does nothing the second
        time."""
        if self.lost.done():
            return
        self.lost.set_result(error)
        runs, self._runs = self._runs, {}
        worst = blamed_progress([run.progress for run in runs.values()], loads=bool(self._loads))
        blamed = [run.progress is worst for run in runs.values()]
        loads = [Suspect(model, None) for model in self._loads.values()]
        self._on_lost(loads or [run.suspect for run in runs.values() if run.progress is worst])
        for run, is_blamed in zip(runs.values(), blamed, strict=True):
            run.lost(error, is_blamed)
        if not self.ready.done():
            self.ready.cancel()

    def close(self) -> None:
        """Closes the socket. Called when the process is gone: before that its last messages may still come."""
        self._connection.close()

    # --- events of the connection -------------------------------------------------------------------------------------

    def frame(self, payload: bytes, fds: list[int]) -> None:
        if self.lost.done():
            close_fds(fds)
            return
        self.heard += 1
        message = messages.decode_from_engine(payload)
        match message:
            case messages.Stepping():
                self._stepping(message)
            case messages.Stepped():
                self._stepped(message)
            case messages.PromptScored():
                if (run := self._runs.get(message.request)) is not None:
                    run.prompt_scored(message)
            case messages.Finished(capture=None):
                self._runs.pop(message.request).finished(message)
            case messages.Finished():
                self._runs.pop(message.request).captured(message, fds[0])
            case messages.LogitsReady():
                self._runs.pop(message.request).logits(message, fds[0])
            case messages.KvExported():
                self._runs.pop(message.request).exported(message, fds[0])
            case messages.Failed() if message.request in self._runs:
                self._runs.pop(message.request).failed(from_code(message.code, message.message, message.data))
            case messages.Failed() | messages.CallAnswer():
                self._end_call(message)
            case messages.Ready():
                self.ready.set_result(message)
            case messages.Alive():
                pass
            case _:
                self._listener.received(self, message)

    def broken(self, error: ProtocolError) -> None:
        log.error("engine_garbled error=%s", error)
        self.lose(EngineLost("the engine sent garbage: the session is kept, try again"))

    def congested(self, is_congested: bool) -> None:
        if is_congested:
            log.warning("engine_slow queued=%d", self._connection.queued_bytes)

    def closed(self) -> None:
        if not self.over.done():
            self.over.set_result(None)
        self.lose(EngineLost("the engine died: the session is kept, try again"))

    # ----------------------------------------------------------------------------------------------------------------

    def _stepping(self, message: messages.Stepping) -> None:
        for start in message.started:
            if start.request in self._runs:
                self._runs[start.request].started(start.at, start.woken)

    def _stepped(self, message: messages.Stepped) -> None:
        now = time.monotonic()
        runs = self._runs
        given = [(runs[token.request], token) for token in message.tokens if token.request in runs]
        urgent = [(run, token) for run, token in given if run.is_urgent]
        if 0 < len(urgent) < len(given):
            for run, token in urgent:
                run.token(token.token, token.logprobs, now)
            for run, _ in urgent:
                run.tell()
            given = [(run, token) for run, token in given if not run.is_urgent]
        for run, token in given:
            run.token(token.token, token.logprobs, now)

    def _end_call(self, message: messages.CallAnswer | messages.Failed) -> None:
        future = self._calls.get(message.request)
        if future is None or future.done():  # the caller was cancelled
            return
        if isinstance(message, messages.Failed):
            future.set_exception(from_code(message.code, message.message, message.data))
        else:
            future.set_result(message)
