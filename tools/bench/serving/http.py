"""What HTTP costs over the native client, on the same machine, and what idle streams cost the gateway.

    python -m tools.bench.serving.http

The model is djinn-tiny, whose steps are short, so that the cost shows. Native and HTTP runs alternate; medians count.
Idle streams wait for a stand-in that takes each request and never answers, so that only the gateway is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from djinn_client import AsyncSession
from djinn_client.protocol import FrameDecoder, Hello, Welcome, decode_request, encode
from tools.private_daemon import PrivateDaemon

MODEL = "djinn-tiny"
PROMPT = "def fibonacci("
TOKENS = 128
ROUNDS = 7
STREAMS = 16
IDLE = 1000
CONFIG = "device: cpu\nmemory: 1GiB\n"
LIMITS = "http: {loopback_without_token: true, requests_per_token: 2048, ping_seconds: 1s}\n"


class Run(NamedTuple):
    first_s: float  # to the first token, median of the streams
    tokens_per_s: float  # of all streams


async def native(address: str, streams: int) -> Run:
    async def one() -> float:
        began, first = time.monotonic(), 0.0
        async with AsyncSession(MODEL, address=address) as session:
            async for _ in session.stream(PROMPT, max_tokens=TOKENS, ignore_eos=True):
                first = first or time.monotonic() - began
        return first

    return await _together(one, streams)


async def over_http(path: str, streams: int) -> Run:
    wanted = {"model": MODEL, "prompt": PROMPT, "max_tokens": TOKENS, "temperature": 0}
    request = _request(wanted | {"ignore_eos": True, "stream": True, "n": 1})

    async def one() -> float:
        began, first = time.monotonic(), 0.0
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(request)
        async for line in reader:
            if line.startswith(b"data: {"):
                first = first or time.monotonic() - began
            elif line.startswith(b"data: [DONE]"):
                break
        writer.close()
        return first

    return await _together(one, streams)


async def _together(one: Callable[[], Awaitable[float]], streams: int) -> Run:
    began = time.monotonic()
    firsts = await asyncio.gather(*[one() for _ in range(streams)])
    return Run(statistics.median(firsts), streams * TOKENS / (time.monotonic() - began))


@contextmanager
def gateway(folder: Path, daemon: str) -> Iterator[tuple[str, int]]:
    """Its socket and its pid."""
    path, file = str(folder / "http.sock"), folder / "gateway.yaml"
    file.write_text(LIMITS + f"state_dir: {folder}\n")
    options = [f"--config={file}", f"--socket={daemon}", f"--listen={path}"]
    with subprocess.Popen(
        [sys.executable, "-m", "djinnd.gateway", *options], stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stderr is not None
            while "gateway_ready" not in (line := process.stderr.readline()):
                assert line, "the gateway ended"
            asyncio.get_running_loop().run_in_executor(
                None, process.stderr.read
            )  # so that its log never fills the pipe
            yield path, process.pid
        finally:
            process.terminate()


async def compare(address: str, path: str, streams: int) -> tuple[Run, Run]:
    """Medians of native runs and of runs over HTTP."""
    runs: tuple[list[Run], list[Run]] = [], []
    for _ in range(ROUNDS):
        runs[0].append(await native(address, streams))
        runs[1].append(await over_http(path, streams))
    return tuple(Run(*map(statistics.median, zip(*each, strict=True))) for each in runs)  # type: ignore[return-value]


async def idle(folder: Path) -> tuple[float, float]:
    """MiB of the gateway before and with IDLE streams."""
    silent = await asyncio.start_unix_server(_greet, str(folder / "silent.sock"), backlog=IDLE)
    async with silent:
        with gateway(folder, str(folder / "silent.sock")) as (path, pid):
            before = _resident(pid)
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
            writers = []
            for _ in range(IDLE):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(_request(chat))
                writers.append((reader, writer))
            for reader, _ in writers:
                await reader.readuntil(b": ping")
            after = _resident(pid)
            for _, writer in writers:
                writer.close()
    return before, after


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """A daemon that says Welcome, and nothing more."""
    decoder = FrameDecoder(1 << 20)
    with suppress(asyncio.CancelledError):  # at the bench's end
        while data := await reader.read(65536):
            for frame in decoder.feed(data):
                message = decode_request(frame.payload)
                if isinstance(message, Hello):
                    writer.write(encode(Welcome(id=message.id, version="", user=os.getuid(), admin=False)))
    writer.close()


def _request(body: dict[str, object]) -> bytes:
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    content = json.dumps(body).encode()
    return f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def _told(plain: float, http: float, factor: float = 1.0) -> str:
    return f"{factor * plain:.1f} native, {factor * http:.1f} over HTTP"


def _resident(pid: int) -> float:
    found = re.search(r"VmRSS:\s*(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


async def main() -> None:
    with tempfile.TemporaryDirectory(prefix="djinnd-", dir="/tmp") as name:
        folder = Path(name)
        with PrivateDaemon(folder, CONFIG) as daemon:
            await asyncio.to_thread(daemon.wait_until_ready)
            with gateway(folder, daemon.address) as (path, _):
                await compare(daemon.address, path, 1)  # the model is loaded, and code is warm
                for streams in (1, STREAMS):
                    plain, http = await compare(daemon.address, path, streams)
                    print(f"{streams:3} streams, first token: {_told(plain.first_s, http.first_s, 1e3)} ms")
                    print(f"{streams:3} streams: {_told(plain.tokens_per_s, http.tokens_per_s)} tokens/s")
        before, after = await idle(folder)
        print(f"{IDLE} idle streams: {after:.0f} MiB of the gateway, {before:.0f} MiB before")


if __name__ == "__main__":
    socket.setdefaulttimeout(60)
    asyncio.run(main())
