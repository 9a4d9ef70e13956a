"""A real engine on a thread of the test, which holds the server's end of the socket pair."""

from __future__ import annotations

import mmap
import os
import socket
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import posix_ipc

from djinn_client.protocol import FrameDecoder, ModelInfo, Sampling
from djinnd import messages
from djinnd.device import Device
from djinnd.device.cpu import CpuDevice
from djinnd.engine.engine import Engine
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.paging.transfers import Transfers
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.messages import MAX_FRAME, FromEngine, ToEngine
from djinnd.scheduler.scheduler import Scheduler
from djinnd.scheduler.waits import Waits
from tests.support.loaded import MEMORY

FOREVER = 60.0  # seconds until a test has failed

M = TypeVar("M")
GrantArena = Callable[[messages.NeedArena], messages.ArenaReady | messages.ArenaRefused]


class EngineThread:
    """Used with `with`: leaves neither a thread nor shared memory behind."""

    def __init__(self, device: Device | None = None, max_batch_tokens: int = 64, max_rows: int = 32) -> None:
        self.device = device or CpuDevice(MEMORY)
        ours, theirs = socket.socketpair()
        self.socket = ours
        self.socket.settimeout(FOREVER)
        self.channel = ServerChannel(theirs.detach())
        self.engine = Engine(self.channel, self.device, max_batch_tokens, max_rows)
        self.error: BaseException | None = None  # raised by `serve`
        self._decoder = FrameDecoder(MAX_FRAME)
        self.recomputed: Counter[int] = Counter()  # tokens, by tenant
        self.started: list[int] = []  # requests, as far as received
        self._incoming: list[FromEngine] = []
        self.descriptors: list[int] = []
        self.arenas: list[posix_ipc.SharedMemory] = []
        self._numbers = count(1)
        self._thread = threading.Thread(target=self._serve, name="engine", daemon=True)
        self._thread.start()
        self.ready = self.until(messages.Ready)

    def _serve(self) -> None:
        try:
            self.engine.serve()
        except BaseException as error:
            self.error = error
        finally:
            self.channel.close()

    # --- exit ---------------------------------------------------------------------------------------------------------

    def join(self) -> None:
        """Returns when `serve` has returned."""
        self._thread.join(FOREVER)
        assert not self._thread.is_alive(), "the engine does not end"

    def __enter__(self) -> EngineThread:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()
        self.join()
        for runner in self.engine._runners.values():  # the exit of a real process would free all this
            if (file := self.transfers(runner.name).disk) is not None:
                file.close()
            runner.release()
        self.device.close()
        for fd in self.descriptors:
            os.close(fd)
        for arena in self.arenas:
            arena.close_fd()
            arena.unlink()
        assert error[0] is not None or self.error is None, self.error

    # --- parts of the engine ------------------------------------------------------------------------------------------

    @property
    def scheduler(self) -> Scheduler:
        return self.engine._scheduler

    @property
    def waits(self) -> Waits:
        return self.engine._tiers._waits

    def runner(self, model: str = "m") -> ModelRunner:
        return self.engine._runners[model]

    def transfers(self, model: str = "m") -> Transfers:
        return self.engine._tiers._models[model].transfers

    def end_background_work(self) -> None:
        """Returns when the work that has been given to the engine's thread for windows is done."""
        self.engine._background.begin(lambda: None).result(FOREVER)

    # --- messages ---------------------------------------------------------------------------------------------------

    def send(self, *sent: ToEngine, fds: Sequence[int] = ()) -> None:
        """Sends the messages in one piece, so that the engine has all of them before it composes the next step. `fds`:
        descriptors of the only message; they stay the caller's."""
        data = b"".join(messages.encode(message, len(fds)) for message in sent)
        if fds:
            sent_bytes = socket.send_fds(self.socket, [data], [*fds])
            data = data[sent_bytes:]
        self.socket.sendall(data)

    def receive(self) -> FromEngine:
        """The next message, except Alive, GrammarTime, Stepping and Recomputed. Raises TimeoutError, or EOFError if the
        engine is gone."""
        while True:
            while not self._incoming:
                data, fds, _, _ = socket.recv_fds(self.socket, 1 << 16, 16)
                self.descriptors += fds
                if not data:
                    raise EOFError
                self._incoming += [messages.decode_from_engine(f.payload) for f in self._decoder.feed(data)]
            message = self._incoming.pop(0)
            if isinstance(message, messages.Stepping):
                self.started += [started.request for started in message.started]
            elif isinstance(message, messages.Recomputed):
                self.recomputed.update(message.tokens)
            elif not isinstance(message, messages.Alive | messages.GrammarTime):
                return message

    def until(self, kind: type[M], *others: type) -> M:
        """The next message of this kind. Messages of `others` before it are dropped; any other message is a failure."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message
            assert isinstance(message, others), message

    def outcome(self, request: int) -> tuple[list[int], FromEngine]:
        """The tokens of a request and its final reply. A message of another request is a failure."""
        tokens: list[int] = []
        while True:
            message = self.receive()
            if isinstance(message, messages.Stepped):
                assert all(token.request == request for token in message.tokens), message
                tokens += [token.token for token in message.tokens]
            else:
                assert getattr(message, "request", None) == request, message
                return tokens, message

    def outcomes(self, requests: list[int]) -> dict[int, tuple[list[int], FromEngine]]:
        """The tokens and final replies of several requests."""
        tokens: dict[int, list[int]] = {request: [] for request in requests}
        replies: dict[int, FromEngine] = {}
        while len(replies) < len(requests):
            message = self.receive()
            if isinstance(message, messages.Stepped):
                for token in message.tokens:
                    assert token.request not in replies, f"{token} after the final reply"
                    tokens[token.request].append(token.token)
            else:
                assert message.request not in replies, f"{message} is a second final reply"  # type: ignore[union-attr]
                replies[message.request] = message  # type: ignore[union-attr]
        return {request: (tokens[request], replies[request]) for request in requests}

    # --- the server's part --------------------------------------------------------------------------------------------

    def number(self) -> int:
        return next(self._numbers)

    def load(self, folder: Path, name: str = "m", grant: GrantArena | None = None, **more: Any) -> FromEngine:
        """The final reply, Loaded or Failed. The model has no lower tiers, unless `more` has their sizes."""
        request, later = self.number(), list[FromEngine]()
        self.send(messages.Load(request, name, str(folder), **({"host_kv_bytes": 0} | more)))
        while True:
            message = self.receive()
            if isinstance(message, messages.NeedArena) and message.holds == "pages":
                later.append(message)  # it can come before the end of the load, from another thread
            elif isinstance(message, messages.NeedArena):
                self.send((grant or self.grant)(message))
            elif isinstance(message, messages.Loaded | messages.Failed) and message.request == request:
                self._incoming[:0] = later
                return message

    def loaded(self, folder: Path, name: str = "m", **more: Any) -> ModelInfo:
        reply = self.load(folder, name, **more)
        assert isinstance(reply, messages.Loaded), reply
        return reply.model

    def grant(self, need: messages.NeedArena) -> messages.ArenaReady:
        nbytes = mmap.PAGESIZE + need.nbytes
        arena = posix_ipc.SharedMemory(f"/djinnd-test-{uuid.uuid4().hex}", posix_ipc.O_CREX, size=nbytes)
        self.arenas.append(arena)
        os.posix_fallocate(arena.fd, 0, nbytes)
        return messages.ArenaReady(need.request, arena.name, offset=mmap.PAGESIZE, complete=False)

    def open(self, session: str, model: str = "m", tenant: int = 0, tokens: list[int] | None = None) -> None:
        self.send(messages.Open(session, model, tenant, "agent", tokens or []))

    def run(self, session: str, prompt: list[int], max_tokens: int, **more: Any) -> int:
        """The number of the request."""
        message = self.run_message(session, prompt, max_tokens, **more)
        self.send(message)
        return message.request

    def run_message(self, session: str, prompt: list[int], max_tokens: int, **more: Any) -> messages.Run:
        return messages.Run(self.number(), session, prompt, max_tokens, Sampling(seed=0), **more)

    def report(self, check: bool = True) -> messages.Report:
        """The report of an idle engine. `check`: asserts that the audit finds nothing."""
        request = self.number()
        self.send(messages.Inquire(request, check))
        report = self.until(messages.Report)
        assert report.request == request and report.findings == []
        return report

    def logits(self, reply: FromEngine) -> npt.NDArray[np.float32]:
        """[tokens, vocab], in the last descriptor that came."""
        assert isinstance(reply, messages.LogitsReady), reply
        with mmap.mmap(self.descriptors[-1], 0, access=mmap.ACCESS_READ) as memory:
            return np.frombuffer(memory, np.float32).reshape(reply.tokens, reply.vocab).copy()
