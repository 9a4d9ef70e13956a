"""An engine process without its server, to compare the daemon with."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from typing import Self, TypeVar

import posix_ipc

from djinn_client.protocol import FrameDecoder, ModelInfo, Sampling
from djinnd.messages import (
    MAX_FRAME,
    ArenaReady,
    BudgetSet,
    Close,
    Failed,
    Finished,
    FromEngine,
    Load,
    Loaded,
    NeedArena,
    Open,
    Ready,
    Run,
    SetBudget,
    Shutdown,
    Stepped,
    ToEngine,
    decode_from_engine,
    encode,
)

M = TypeVar("M")

STOP_LIMIT_S = 60.0


class DirectEngine:
    """Speaks djinnd.messages with `python -m djinnd.engine` as the server does, one request at a time."""

    def __init__(self, device: str, memory: int) -> None:
        self._socket, theirs = socket.socketpair()
        self._join = self._start(theirs, device, memory)
        self._decoder = FrameDecoder(MAX_FRAME)
        self._incoming = self._messages()
        self._arena: posix_ipc.SharedMemory | None = None
        self._requests = count(1)
        self._wait_for(Ready)

    def _start(self, theirs: socket.socket, device: str, memory: int) -> Callable[[float], object]:
        """Starts the engine, which owns the socket. → a call that waits for its end, for so many seconds."""
        with theirs:
            options = [f"--fd={theirs.fileno()}", f"--parent={os.getpid()}", f"--device={device}", f"--memory={memory}"]
            command = [sys.executable, "-m", "djinnd.engine", *options, "--log-level=error"]
            return subprocess.Popen(command, pass_fds=[theirs.fileno()]).wait

    def load(self, model: str, path: str, kv_bytes: int = 0) -> ModelInfo:
        """Loads a model without lower tiers, so that no copies run beside the measurement."""
        request = next(self._requests)
        self._send(Load(request=request, model=model, path=path, kv_bytes=kv_bytes, host_kv_bytes=0, disk_kv_bytes=0))
        info = self._wait_for(Loaded).model
        self._drop_arena()
        return info

    def rate(self, model: str, prompts: Sequence[list[int]], tokens: int) -> float:
        """Greedy tokens a second of all sessions together, after their prompts. The sessions are closed afterwards."""
        with self.sessions(model, prompts) as names:
            began = time.perf_counter()
            generated = self.run(names, tokens)
            seconds = time.perf_counter() - began
        assert generated == len(prompts) * tokens, (generated, len(prompts), tokens)
        return generated / seconds

    @contextmanager
    def sessions(self, model: str, prompts: Sequence[list[int]]) -> Iterator[list[str]]:
        """Names of sessions, one for each prompt, that have read it. They are closed afterwards."""
        names = [f"direct-{index}" for index in range(len(prompts))]
        for name in names:
            self._send(Open(session=name, model=model, tenant=0, priority="interactive"))
        self.run(names, 1, prompts)
        yield names
        for name in names:
            self._send(Close(session=name))

    def run(self, names: list[str], tokens: int, prompts: Sequence[list[int]] = ()) -> int:
        """Lets the sessions generate, after their prompts if there are any. Returns the number of tokens."""
        for name, prompt in zip(names, prompts or [[]] * len(names), strict=True):
            self._send(Run(next(self._requests), name, prompt, max_tokens=tokens, sampling=Sampling(seed=0)))
        return sum(self._wait_for(Finished).generated for _ in names)

    def generate(
        self, model: str, prompts: list[list[int]], tokens: int, budgets: dict[int, int]
    ) -> tuple[list[list[int]], list[BudgetSet]]:
        """Generates greedy tokens in sessions that all begin in one step. `budgets` maps a step to the device's budget
        that is requested after it. Returns the tokens of each prompt, and the replies to the changes of budget."""
        names = [f"budget-{index}" for index in range(len(prompts))]
        for name in names:
            self._send(Open(session=name, model=model, tenant=0, priority="interactive"))
        runs = [
            Run(next(self._requests), name, prompt, max_tokens=tokens, sampling=Sampling(seed=0))
            for name, prompt in zip(names, prompts, strict=True)
        ]
        self._socket.sendall(b"".join(encode(run) for run in runs))
        given: dict[int, list[int]] = {run.request: [] for run in runs}
        unfinished, steps, changes = set(given), 0, []
        for message in self._incoming:
            match message:
                case Stepped():
                    steps += 1
                    for token in message.tokens:
                        given[token.request].append(token.token)
                    if steps in budgets:
                        self._send(SetBudget(next(self._requests), budgets[steps]))
                case Finished():
                    unfinished.discard(message.request)
                case BudgetSet():
                    changes.append(message)
                case Failed():
                    raise RuntimeError(f"the engine failed: {message.message}")
            if not unfinished and len(changes) == len(budgets):
                break
        for name in names:
            self._send(Close(session=name))
        return list(given.values()), changes

    def _send(self, message: ToEngine) -> None:
        self._socket.sendall(encode(message))

    def _wait_for(self, kind: type[M]) -> M:
        """Waits for the next message of this kind, and drops the others. It takes care of arenas and raises
        failures."""
        for message in self._incoming:
            if isinstance(message, kind):
                return message
            if isinstance(message, NeedArena):
                self._give_arena(message)
            elif isinstance(message, Failed):
                raise RuntimeError(f"the engine failed: {message.message}")
        raise RuntimeError("the engine has ended")

    def _messages(self) -> Iterator[FromEngine]:
        while data := self._socket.recv(1 << 18):
            for frame in self._decoder.feed(data):
                yield decode_from_engine(frame.payload)

    def _give_arena(self, need: NeedArena) -> None:
        self._arena = posix_ipc.SharedMemory(
            f"/djinn-bench-{uuid.uuid4().hex}", posix_ipc.O_CREX, size=mmap.PAGESIZE + need.nbytes
        )
        os.posix_fallocate(self._arena.fd, 0, mmap.PAGESIZE + need.nbytes)
        self._send(ArenaReady(need.request, self._arena.name, offset=mmap.PAGESIZE, complete=False))

    def _drop_arena(self) -> None:
        """Removes the arena's name; the memory lives while the engine maps it."""
        if self._arena is not None:
            self._arena.close_fd()
            self._arena.unlink()
            self._arena = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._drop_arena()
        with suppress(BrokenPipeError):
            self._send(Shutdown())
        self._socket.close()
        self._join(STOP_LIMIT_S)
