"""The cost of HTTP over the native client on the same machine, and of idle streams in the gateway.

    python -m tools.bench.serving.http [--device DEVICE] [--streams 16] [--idle 1000] [--record]

The model is djinn-tiny: its steps are short, so the cost shows. Native and HTTP runs alternate, and medians count. Idle
streams wait for a stand-in that takes each request and never answers, so that only the gateway is measured.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

from djinn_client import AsyncSession
from djinn_client.protocol import FrameDecoder, Hello, Welcome, decode_request, encode
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import device_name, private_daemon
from tools.bench.harness.turns import in_turns
from tools.bench.harness.usage import resident_bytes

MODEL = "djinn-tiny"
PROMPT = "def fibonacci("
TOKENS = 128
LIMITS = "http: {loopback_without_token: true, requests_per_token: 2048, ping_seconds: 1s}\n"


class Run(NamedTuple):
    first_s: float  # to the first token, the median of the streams
    tokens_per_s: float  # of all streams together


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
    """Runs a gateway of the daemon. Gives its socket and its pid."""
    path, file, log = str(folder / "http.sock"), folder / "gateway.yaml", folder / "gateway.log"
    file.write_text(LIMITS + f"state_dir: {folder}\n")
    options = [f"--config={file}", f"--socket={daemon}", f"--listen={path}"]
    with (
        log.open("w") as said,
        subprocess.Popen([sys.executable, "-m", "djinnd.gateway", *options], stderr=said) as process,
    ):
        try:
            while "gateway_ready" not in log.read_text():
                assert process.poll() is None, log.read_text()
                time.sleep(0.02)
            yield path, process.pid
        finally:
            process.terminate()


def compare(address: str, path: str, streams: int, rounds: int) -> dict[str, Run]:
    """Medians of native runs and of runs over HTTP, after a run of each that warms up."""
    ways = {
        "native": lambda: asyncio.run(native(address, streams)),
        "http": lambda: asyncio.run(over_http(path, streams)),
    }
    found = in_turns(ways, 1 + rounds)
    return {way: Run(*map(statistics.median, zip(*runs[1:], strict=True))) for way, runs in found.items()}


async def idle(folder: Path, streams: int) -> dict[str, float]:
    """MiB that the gateway has without streams, and with so many that wait."""
    silent = await asyncio.start_unix_server(_greet, str(folder / "silent.sock"), backlog=streams)
    async with silent:
        with gateway(folder, str(folder / "silent.sock")) as (path, pid):
            before = resident_bytes(pid)
            chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], "stream": True}
            connections = []
            for _ in range(streams):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(_request(chat))
                connections.append((reader, writer))
            for reader, _ in connections:
                await reader.readuntil(b": ping")
            waiting = resident_bytes(pid)
            for _, writer in connections:
                writer.close()
    return {"none": before / (1 << 20), "waiting": waiting / (1 << 20)}


async def _greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Stands in for a daemon: says Welcome, and then nothing."""
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


def measure(device: str, memory: str, streams: int, waiting: int, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="djinnd-", dir="/tmp") as name:
        folder = Path(name)
        with private_daemon({"device": device, "memory": memory}, folder) as address:
            with gateway(folder, address) as (path, _):
                found = {}
                for count in sorted({1, streams}):
                    say(f"{count} streams")
                    found[count] = {way: run._asdict() for way, run in compare(address, path, count, rounds).items()}
            on = device_name(address)
        say(f"{waiting} idle streams")
        return {"device": on, "streams": found, "idle_mib": asyncio.run(idle(folder, waiting))}


def table(found: dict[str, Any]) -> Table:
    shown = Table("streams", "", "native", "HTTP", title=f"{MODEL} on {found['device']}")
    for streams, ways in found["streams"].items():
        first, rate = ([ways[way][figure] for way in ("native", "http")] for figure in Run._fields)
        shown.add_row(str(streams), "first token", *(f"{seconds * 1e3:.1f} ms" for seconds in first))
        shown.add_row("", "tokens/s", *(f"{tokens:,.1f}" for tokens in rate))
    return shown


def summary(found: dict[str, Any], waiting: int) -> str:
    told = []
    for streams, ways in found["streams"].items():
        plain, http = (Run(**ways[way]) for way in ("native", "http"))
        told.append(
            f"{streams} stream{'s' * (streams > 1)}: first token {plain.first_s * 1e3:.1f} ms native, "
            f"{http.first_s * 1e3:.1f} over HTTP, tokens/s {plain.tokens_per_s:,.1f} and {http.tokens_per_s:,.1f}"
        )
    idle = found["idle_mib"]
    told.append(f"{waiting} idle streams: {idle['waiting']:.0f} MiB of the gateway, {idle['none']:.0f} MiB before")
    return "; ".join(told)


@command.bench("http", __doc__)
@command.device
@click.option("--memory", default="1GiB", show_default=True, help="Budget of the daemon.")
@click.option("--streams", default=16, show_default=True, help="Streams at once, beside one alone.")
@click.option("--idle", "waiting", default=1000, show_default=True, help="Streams that wait.")
@command.rounds(7)
def main(device: str, memory: str, streams: int, waiting: int, rounds: int) -> Result:
    found = measure(device, memory, streams, waiting, rounds)
    shown, told = table(found), summary(found, waiting)
    shown.caption = told.rpartition("; ")[2]
    parameters = {"model": MODEL, "streams": streams, "idle": waiting, "tokens": TOKENS, "rounds": rounds}
    return Result(parameters, found, told, [shown])


if __name__ == "__main__":
    main()
