"""What the daemon costs: an empty call, a signal, and tokens a second beside the engine driven directly.

    python -m tools.bench.ipc [--model NAME] [--device DEVICE] [--record]

Daemon and engine run side by side and are measured in turns, so that what else the machine does strikes both alike.
Greedy tokens; sessions are opened before the clock starts and all generate at once.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console
from rich.table import Table

import djinn_client as djinn
from tools.bench.direct_engine import DirectEngine
from tools.bench.report import keep, report
from tools.private_daemon import PrivateDaemon

PROMPT = list(range(100, 132))  # token ids, below any model's vocabulary


class Workload(NamedTuple):
    sessions: int
    tokens: int  # that each of them generates


class Costs(NamedTuple):
    """Of single calls, in microseconds by percentile."""

    empty_call: dict[str, float]  # to the answer
    io_wait: dict[str, float]  # which has none


class Throughput(NamedTuple):
    """Tokens a second of all sessions together, medians over the rounds; and what is lost of the direct rate, the
    median of each round's own, so that a round that was slow as a whole does not count against either."""

    direct: float
    daemon: float
    streamed: float  # through the daemon, a Piece for each step
    daemon_lost: float
    streamed_lost: float


def round_trips(address: str, calls: int) -> dict[str, float]:
    """Microseconds of an empty call on a connection that is there."""
    with djinn.Client(address) as client:
        for _ in range(calls // 10):
            client.ping()
        return _percentiles([_seconds_of(client.ping) for _ in range(calls)])


def signals(address: str, model: str, calls: int) -> dict[str, float]:
    """Microseconds of an IO_WAIT in the client of a session that has KV. Before each it has had an answer from the
    daemon, as an agent that is about to call a tool; so the daemon has heard the one before."""
    with djinn.Session(model, address=address) as session, djinn.Client(address) as client:
        session.generate(PROMPT, max_tokens=1)

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


async def daemon_rate(address: str, model: str, work: Workload, *, stream: bool) -> float:
    """Tokens a second through the daemon; this process is the client of all its sessions."""
    sessions = [await djinn.AsyncSession(model, address=address).open() for _ in range(work.sessions)]
    try:
        began = time.perf_counter()
        await asyncio.gather(*(_generate(session, work.tokens, stream=stream) for session in sessions))
        return work.sessions * work.tokens / (time.perf_counter() - began)
    finally:
        for session in sessions:
            await session.close()


async def _generate(session: djinn.AsyncSession, tokens: int, *, stream: bool) -> None:
    if stream:
        async for _ in session.stream(PROMPT, max_tokens=tokens, ignore_eos=True):
            pass
    else:
        await session.generate(PROMPT, max_tokens=tokens, ignore_eos=True)


def throughput(address: str, model: str, engine: DirectEngine, work: Workload, rounds: int) -> Throughput:
    """The first round warms up and does not count. Each round has another order: whoever comes after a pause finds
    processors that have gone to sleep."""
    measures = (
        lambda: engine.rate(model, PROMPT, work.sessions, work.tokens),
        lambda: asyncio.run(daemon_rate(address, model, work, stream=False)),
        lambda: asyncio.run(daemon_rate(address, model, work, stream=True)),
    )
    rates: list[tuple[float, ...]] = []
    for number in range(rounds + 1):
        found = {turn: measures[turn]() for turn in ((number + k) % 3 for k in range(3))}
        rates.append(tuple(found[turn] for turn in range(3)))
    rates = rates[1:]
    lost = [(1 - daemon / direct, 1 - streamed / direct) for direct, daemon, streamed in rates]
    return Throughput(*(statistics.median(column) for column in (*zip(*rates, strict=True), *zip(*lost, strict=True))))


@contextmanager
def both(model: str, device: str, memory: str) -> Iterator[tuple[str, DirectEngine]]:
    """A daemon's address and an engine, each with the model loaded and the same budget."""
    config = f"{{device: '{device}', memory: {memory}}}\n"
    with tempfile.TemporaryDirectory(prefix="djinnd-bench-") as folder, PrivateDaemon(Path(folder), config) as daemon:
        daemon.wait_until_ready()
        info = djinn.load(model, address=daemon.address)
        budget = djinn.status(address=daemon.address).devices[0].budget_bytes
        with DirectEngine(device, budget) as engine:
            engine.load(model, info.path)
            yield daemon.address, engine


def _told(costs: Costs) -> str:
    kinds = (("empty call", costs.empty_call), ("IO_WAIT", costs.io_wait))
    return "; ".join(f"{name} p50 {us['p50_us']:.0f} µs, p99 {us['p99_us']:.0f} µs" for name, us in kinds)


def table(costs: Costs, found: dict[int, Throughput]) -> Table:
    title = _told(costs)
    shown = Table("sessions", "engine directly", "through djinnd", "streamed", title=title, caption="tokens a second")
    for sessions, rates in found.items():
        through = (
            f"{rates.daemon:,.0f} ({-rates.daemon_lost:+.1%})",
            f"{rates.streamed:,.0f} ({-rates.streamed_lost:+.1%})",
        )
        shown.add_row(str(sessions), f"{rates.direct:,.0f}", *through)
    return shown


def summary(costs: Costs, found: dict[int, Throughput]) -> str:
    rates = (
        f"{sessions} session{'s' * (sessions > 1)}: {r.daemon:,.0f} tokens/s, streamed {r.streamed:,.0f}, "
        f"engine directly {r.direct:,.0f} ({-r.daemon_lost:+.1%}, {-r.streamed_lost:+.1%})"
        for sessions, r in found.items()
    )
    return "; ".join([_told(costs), *rates])


@click.command(help=__doc__.split("\n\n", 1)[0])
@click.option("--model", default="djinn-tiny", show_default=True)
@click.option("--device", default="auto", show_default=True)
@click.option("--memory", default="2GiB", show_default=True, help="Budget of the daemon, and as much for the engine.")
@click.option("--calls", default=5000, show_default=True, help="Empty calls, and signals.")
@click.option("--sessions", default=(1, 16), show_default=True, multiple=True)
@click.option("--tokens", default=256, show_default=True, help="A session generates.")
@click.option("--rounds", default=9, show_default=True)
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result there.")
@click.option("--record", "recorded", is_flag=True, help="Add it to docs/results.md.")
def main(
    model: str,
    device: str,
    memory: str,
    calls: int,
    sessions: tuple[int, ...],
    tokens: int,
    rounds: int,
    path: Path | None,
    recorded: bool,
) -> None:
    with both(model, device, memory) as (address, engine):
        costs = Costs(round_trips(address, calls), signals(address, model, calls))
        found = {n: throughput(address, model, engine, Workload(n, tokens), rounds) for n in sessions}
        on = djinn.status(address=address).devices[0].description
    Console().print(table(costs, found))
    parameters = {"model": model, "device": on, "calls": calls, "tokens": tokens, "rounds": rounds}
    results: dict[str, Any] = costs._asdict() | {"sessions": {n: rates._asdict() for n, rates in found.items()}}
    result = report("ipc", parameters, results, summary(costs, found))
    keep(result, path, recorded=recorded)


if __name__ == "__main__":
    main()
