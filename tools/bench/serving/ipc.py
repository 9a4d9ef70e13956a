"""The daemon's cost: an empty call, a signal, and tokens a second beside an engine without its server.

    python -m tools.bench.serving.ipc [--model NAME] [--device DEVICE] [--record]

Daemon and engine run side by side and are measured in many short turns, so that other load of the machine falls on
both. Tokens are greedy. Sessions have read their prompts before the clock starts, and all generate at once. On a shared
machine, processor time tells more than the clock: the server's time as a share of the engine's is the daemon's cost if
both had to share a processor.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from rich.table import Table
from tokenizers import Tokenizer

import djinn_client as djinn
from tools.bench.engine.direct_engine import DirectEngine
from tools.bench.harness import command
from tools.bench.harness.command import Result
from tools.bench.harness.daemon import device_name, private_daemon
from tools.bench.harness.sessions import open_sessions
from tools.bench.harness.spread import Median, median

PROMPT = 'def fibonacci(n):\n    """The first n Fibonacci numbers."""\n    numbers = [0, 1]\n'


class Workload(NamedTuple):
    prompt: list[int]
    sessions: int
    tokens: int  # tokens that each of them generates


class Costs(NamedTuple):
    """Costs of single calls, in microseconds by percentile."""

    empty_call: dict[str, float]  # until its answer
    io_wait: dict[str, float]  # has no answer


class Throughput(msgspec.Struct, frozen=True):
    """Tokens a second of all sessions together, medians over the turns.

    The lost share of the direct rate is computed for each turn, and its median counts. So a time in which the machine
    was slow affects neither figure.
    """

    direct: float
    daemon: float
    streamed: float  # through the daemon, with a Piece for each step
    daemon_lost: Median
    streamed_lost: Median
    server_share: float  # the server's processor time, as a share of the engine's; without pieces
    streamed_share: float  # the same share, with pieces


def prompt_of(checkpoint: Path) -> list[int]:
    """The prompt's tokens, or some tokens that every model has if the checkpoint has no tokenizer. (The text after such
    tokens is half broken characters, which cost the server more time.)"""
    file = checkpoint / "tokenizer.json"
    return Tokenizer.from_file(str(file)).encode(PROMPT).ids if file.exists() else list(range(100, 132))


class Used:
    """Counts processor time of the daemon's two processes, while its context lasts."""

    def __init__(self, server: int, engine: int) -> None:
        self._pids = server, engine
        self._seconds = [0.0, 0.0]

    @property
    def share(self) -> float:
        server, engine = self._seconds
        return server / engine

    def __enter__(self) -> None:
        self._before = list(map(processor_seconds, self._pids))

    def __exit__(self, *error: object) -> None:
        for index, before in enumerate(self._before):
            self._seconds[index] += processor_seconds(self._pids[index]) - before


def processor_seconds(pid: int) -> float:
    """Processor time of all threads of a process, as the kernel counts it: in hundredths of a second."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def round_trips(address: str, calls: int) -> dict[str, float]:
    """Microseconds of an empty call on an open connection."""
    with djinn.Client(address) as client:
        for _ in range(calls // 10):
            client.ping()
        return _percentiles([_seconds_of(client.ping) for _ in range(calls)])


def signals(address: str, model: str, prompt: list[int], calls: int) -> dict[str, float]:
    """Microseconds of an IO_WAIT in the client, for a session with KV. A call is answered before each, as for an agent
    that is about to use a tool; so the daemon has read the signal before."""
    with djinn.Session(model, address=address) as session, djinn.Client(address) as client:
        session.generate(prompt, max_tokens=1)

        def wait() -> None:
            session.signal("IO_WAIT", expected_s=8.0, tool="search")

        times = []
        for _ in range(calls // 10 + calls):
            session.signal("COMPUTE")
            client.ping()
            times.append(_seconds_of(wait))
        return _percentiles(times[-calls:])


def _seconds_of(call: Callable[[], None]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def _percentiles(seconds: list[float]) -> dict[str, float]:
    percentiles = statistics.quantiles(seconds, n=100, method="inclusive")
    return {"p50_us": percentiles[49] * 1e6, "p99_us": percentiles[98] * 1e6}


async def daemon_rate(address: str, model: str, work: Workload, used: Used, *, stream: bool) -> float:
    """Tokens a second through the daemon. This process is the client of all sessions. Adds processor time to `used`."""
    async with open_sessions(address, model, work.sessions) as sessions:
        await asyncio.gather(*(session.generate(work.prompt, max_tokens=1, ignore_eos=True) for session in sessions))
        with used:
            began = time.perf_counter()
            await asyncio.gather(*(_generate(session, work.tokens, stream=stream) for session in sessions))
            seconds = time.perf_counter() - began
        return work.sessions * work.tokens / seconds


async def _generate(session: djinn.AsyncSession, tokens: int, *, stream: bool) -> None:
    if stream:
        async for _ in session.stream(max_tokens=tokens, ignore_eos=True):
            pass
    else:
        await session.generate(max_tokens=tokens, ignore_eos=True)


def throughput(address: str, model: str, engine: DirectEngine, work: Workload, rounds: int) -> Throughput:
    """Measures the daemon between two turns of the engine each time, and compares it with their mean. The first turns
    warm up."""

    def alone() -> float:
        return engine.rate(model, [work.prompt] * work.sessions, work.tokens)

    def through(used: Used, *, stream: bool) -> float:
        return asyncio.run(daemon_rate(address, model, work, used, stream=stream))

    status = djinn.status(address=address)
    warm, plain, pieces = (Used(status.pid, status.devices[0].pid) for _ in range(3))
    through(warm, stream=False), through(warm, stream=True), alone()
    direct, daemon, streamed = [alone()], [], []
    for _ in range(rounds):
        daemon.append(through(plain, stream=False))
        direct.append(alone())
        streamed.append(through(pieces, stream=True))
        direct.append(alone())
    beside = [statistics.fmean(pair) for pair in pairwise(direct)]
    return Throughput(
        statistics.median(direct),
        statistics.median(daemon),
        statistics.median(streamed),
        median([1 - rate / by for rate, by in zip(daemon, beside[::2], strict=True)]),
        median([1 - rate / by for rate, by in zip(streamed, beside[1::2], strict=True)]),
        plain.share,
        pieces.share,
    )


@contextmanager
def both(model: str, device: str, memory: str) -> Iterator[tuple[str, DirectEngine, Path]]:
    """Starts a daemon and an engine with the model loaded and the same budget. Gives the daemon's address, the engine,
    and the model's folder."""
    with private_daemon({"device": device, "memory": memory}) as address:
        info = djinn.load(model, address=address)
        budget = djinn.status(address=address).devices[0].budget_bytes
        with DirectEngine(device, budget) as engine:
            engine.load(model, info.path)
            yield address, engine, Path(info.path)


def _told(costs: Costs) -> str:
    kinds = (("empty call", costs.empty_call), ("IO_WAIT", costs.io_wait))
    return "; ".join(f"{name} p50 {us['p50_us']:.0f} µs, p99 {us['p99_us']:.0f} µs" for name, us in kinds)


def _changed(lost: Median) -> str:
    """The lost share as a change, with its interval of 95 % certainty in brackets."""
    return f"{-lost.value:+.1%} [{-lost.high:+.1%}, {-lost.low:+.1%}]"


def table(costs: Costs, found: dict[int, Throughput]) -> Table:
    title = _told(costs)
    columns = ("sessions", "engine directly", "through djinnd", "streamed", "the server's processor time")
    shown = Table(*columns, title=title, caption="tokens a second; processor time: of the engine's, plain and streamed")
    for sessions, rates in found.items():
        through = (
            f"{rates.daemon:,.0f} ({_changed(rates.daemon_lost)})",
            f"{rates.streamed:,.0f} ({_changed(rates.streamed_lost)})",
        )
        shown.add_row(str(sessions), f"{rates.direct:,.0f}", *through, _shares(rates))
    return shown


def _shares(rates: Throughput) -> str:
    return f"{rates.server_share:.1%}, {rates.streamed_share:.1%}"


def summary(costs: Costs, found: dict[int, Throughput]) -> str:
    rates = (
        f"{sessions} session{'s' * (sessions > 1)}: {r.daemon:,.0f} tokens/s, streamed {r.streamed:,.0f}, "
        f"engine directly {r.direct:,.0f}; {_changed(r.daemon_lost)}, streamed {_changed(r.streamed_lost)}, "
        f"the server's processor time {_shares(r)} of the engine's"
        for sessions, r in found.items()
    )
    return "; ".join([_told(costs), *rates])


@command.bench("ipc", __doc__)
@click.option("--model", default="djinn-tiny", show_default=True)
@command.device
@click.option("--memory", default="2GiB", show_default=True, help="Budget of the daemon, and as much for the engine.")
@click.option("--calls", default=5000, show_default=True, help="Empty calls, and signals.")
@click.option("--sessions", default=(1, 16), show_default=True, multiple=True)
@click.option("--tokens", default=64, show_default=True, help="Tokens that a session generates.")
@click.option("--rounds", default=40, show_default=True, help="Rounds of four turns.")
def main(
    model: str, device: str, memory: str, calls: int, sessions: tuple[int, ...], tokens: int, rounds: int
) -> Result:
    with both(model, device, memory) as (address, engine, folder):
        prompt = prompt_of(folder)
        costs = Costs(round_trips(address, calls), signals(address, model, prompt, calls))
        found = {n: throughput(address, model, engine, Workload(prompt, n, tokens), rounds) for n in sessions}
        on = device_name(address)
    parameters = {"model": model, "device": on, "calls": calls, "tokens": tokens, "rounds": rounds}
    results: dict[str, Any] = costs._asdict() | {"sessions": found}
    return Result(parameters, results, summary(costs, found), [table(costs, found)])


if __name__ == "__main__":
    main()
