"""TCP proxies that harm the connections through them: at random and by a seed, or after a number of bytes."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections import Counter
from contextlib import suppress
from math import inf
from types import TracebackType
from typing import Self

HARMS = ("cut", "truncated", "doubled", "swapped", "delayed", "bent")
CHUNK = 16 << 10
BUFFER = 64 << 10  # bytes of the kernel's buffer; they are lost when a connection is cut


class Proxy:
    """Forwards to a port of 127.0.0.1. `forward` is one direction of a connection: when it returns, both ends of the
    connection are closed."""

    def __init__(self, port: int) -> None:
        self.port = 0
        self._target = port
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._loop: asyncio.AbstractEventLoop
        self._is_over: asyncio.Event

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(60)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self._is_over.set)
        self._thread.join(60)
        assert not self._thread.is_alive()

    async def _run(self) -> None:
        self._loop, self._is_over = asyncio.get_running_loop(), asyncio.Event()
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._is_over.wait()
        server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.05)  # for transports that were aborted

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            writer.transport.abort()
            return
        ways = [asyncio.ensure_future(self._forwarded(*way)) for way in ((reader, back), (there, writer))]
        with suppress(asyncio.CancelledError):  # when the proxy ends
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        for way in ways:
            way.cancel()
        for end in (writer, back):
            end.transport.abort()

    async def _forwarded(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            await self.forward(reader, writer)


class BadProxy(Proxy):
    """Each chunk of bytes is harmed with probability `harm`:

    - cut: the connection ends at once.
    - truncated: a part of the chunk is forwarded, and the connection ends.
    - doubled: the chunk is forwarded twice.
    - swapped: the chunk is forwarded after the next one, if that comes soon.
    - delayed: the chunk waits for some milliseconds.
    - bent: a bit of the chunk is changed.
    """

    def __init__(self, port: int, seed: int, harm: float) -> None:
        super().__init__(port)
        self.harm = harm
        self.done: Counter[str] = Counter()
        self._random = random.Random(seed)

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            harm = self._random.choice(HARMS) if self._random.random() < self.harm else ""
            self.done[harm] += 1
            match harm:
                case "cut":
                    return
                case "truncated":
                    writer.write(data[: self._random.randrange(len(data))])
                    await writer.drain()
                    return
                case "doubled":
                    data += data
                case "swapped":
                    with suppress(TimeoutError):
                        data = await asyncio.wait_for(reader.read(CHUNK), 0.05) + data
                case "delayed":
                    await asyncio.sleep(self._random.random() * 0.02)
                case "bent":
                    at = self._random.randrange(len(data))
                    data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            writer.write(data)
            await writer.drain()


class CuttingProxy(Proxy):
    """Counts bytes, and ends each connection after `every` bytes in one direction."""

    def __init__(self, port: int, every: float = inf) -> None:
        super().__init__(port)
        self.every = every
        self.cuts = 0
        self.passed = 0  # bytes, of all connections in both directions

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
        passed = 0  # on this way
        while data := await reader.read(CHUNK):
            self.passed += len(data)
            passed += len(data)
            if passed >= self.every:
                self.cuts += 1
                return
            writer.write(data)
            await writer.drain()


class MutingProxy(Proxy):
    """Forwards nothing on the next `muted` connections. They stay open until the client gives up."""

    muted = 0

    def __init__(self, port: int) -> None:
        super().__init__(port)
        self._clients: set[asyncio.StreamWriter] = set()

    def cut(self, muted: int) -> None:
        """Ends all connections, and mutes the next ones."""
        self.muted = muted
        for writer in list(self._clients):
            self._loop.call_soon_threadsafe(writer.transport.abort)

    async def forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            writer.write(data)
            await writer.drain()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.muted:
            self.muted -= 1
            while await reader.read(CHUNK):
                pass
            writer.transport.abort()
            return
        self._clients.add(writer)
        await super()._serve(reader, writer)
        self._clients.discard(writer)
