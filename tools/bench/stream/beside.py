"""Decode of a model that streams, by the bus alone and with the host's cores beside it.

    python -m tools.bench.stream.beside CHECKPOINT --memory 24GiB --resident 29 [--slots 4] [--quantise int8]

Prints the rates of the bus alone, of the host alone, and of both at once, all measured in this run; and a step with and
without `cpu_beside_bus`, in turns. The ceiling is a step in which bus and host are busy all the time, each at its rate
beside the other one.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import Any

import click
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import private_daemon
from tools.bench.harness.prompts import prompt
from tools.bench.harness.sessions import open_sessions, step_seconds
from tools.bench.stream.host_rates import HostRates, measured_apart

WAYS = ("off", "auto")
WARM_UP_TOKENS = 16
PACKED = 0.75  # bytes of a packed matrix that cross the bus, of those that the host reads


def ceiling_s(rates: HostRates, streamed_bytes: int, rows: int, share: float) -> float:
    """Seconds of a step. share: bytes over the bus that a byte of weights on the host saves."""
    return streamed_bytes / (rates.bus_beside + share * rates.host_beside[rows])


async def steps_s(address: str, model: str, sessions: int, vocab: int, work: dict[str, Any]) -> list[float]:
    """Seconds of a step, one figure a run."""
    async with open_sessions(address, model, sessions) as opened:
        prompts = (prompt(work["context"], vocab, seed) for seed in range(sessions))
        both = zip(opened, prompts, strict=True)
        await asyncio.gather(*(session.generate(tokens, max_tokens=1, ignore_eos=True) for session, tokens in both))
        await step_seconds(opened, WARM_UP_TOKENS)
        return [await step_seconds(opened, work["tokens"]) for _ in range(work["runs"])]


@command.bench("beside", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.context
@click.option("--resident", default=0, show_default=True, help="Blocks that stay on the device.")
@click.option("--slots", default=0, show_default=True, help="Slots of the ring; 0: the daemon's choice.")
@click.option("--packing", type=click.Choice(["auto", "off"]), default="auto", show_default=True)
@click.option("--quantise", type=click.Choice(["int8"]), help="Default: the weights stay in 16 bits.")
@click.option("--kv", default="2GiB", show_default=True, help="Device memory for KV pages.")
@click.option("--tokens", default=33, show_default=True, help="Tokens that a session generates in a run.")
@click.option("--runs", default=3, show_default=True)
@click.option("--sessions", default=(1, 4), show_default=True, multiple=True)
def main(
    checkpoint: Path,
    device: str,
    memory: str,
    resident: int,
    slots: int,
    packing: str,
    quantise: str | None,
    kv: str,
    **work: Any,
) -> Result:
    rates = measured_apart(checkpoint, device, quantise or "bf16")
    say(f"rates: {rates}")
    settings = {"path": str(checkpoint), "resident": resident, "slots": slots, "packing": packing, "kv": kv}
    settings |= {"host_kv": 0, "disk_kv": 0} | ({"quantise": quantise} if quantise else {})
    models = {way: settings | {"cpu_beside_bus": way} for way in WAYS}
    found: dict[str, dict[int, list[float]]] = {way: {n: [] for n in work["sessions"]} for way in WAYS}
    infos: dict[str, djinn.ModelInfo] = {}
    with private_daemon({"device": device, "memory": memory, "models": models}) as address:
        for way in (*WAYS, *WAYS):
            infos[way] = info = djinn.load(way, address=address)
            say(f"{way}: {info.blocks_streamed} blocks stream, {info.streamed_bytes / 1e9:.2f} GB a step, {info.notes}")
            for n, times in found[way].items():
                times += asyncio.run(steps_s(address, way, n, info.vocab, work))
                say(f"{way}, {n} sessions: {statistics.median(times) * 1e3:.2f} ms a step")
            djinn.unload(way, address=address)
    is_packed = not quantise and not any("stay plain" in note for note in infos["off"].notes)
    share = PACKED if is_packed else 1.0
    ceilings = {n: ceiling_s(rates, infos["off"].streamed_bytes, _measured(rates, n), share) for n in work["sessions"]}
    table = Table("sessions", "bus alone, ms", "both, ms", "ceiling, ms", caption=_told(rates))
    rows, told = [], []
    for n in work["sessions"]:
        alone, both = (statistics.median(found[way][n]) * 1e3 for way in WAYS)
        rows.append({"sessions": n, "bus_alone_ms": alone, "both_ms": both, "ceiling_ms": ceilings[n] * 1e3})
        table.add_row(str(n), f"{alone:.2f}", f"{both:.2f}", f"{ceilings[n] * 1e3:.2f}")
        told.append(
            f"{n} sessions {both:.1f} ms a step ({alone:.1f} by the bus alone, ceiling {ceilings[n] * 1e3:.1f})"
        )
    results = {
        "rows": rows,
        "bus_bytes_per_s": rates.bus,
        "bus_beside_bytes_per_s": rates.bus_beside,
        "host_bytes_per_s": rates.host,
        "host_beside_bytes_per_s": rates.host_beside,
        "threads": rates.threads,
        "streamed_bytes": {way: info.streamed_bytes for way, info in infos.items()},
        "notes": infos["auto"].notes,
    }
    parameters = {"model": checkpoint.name, "memory": memory, **settings, **work}
    return Result(parameters, results, "; ".join([_told(rates), *told]), [table])


def _measured(rates: HostRates, sessions: int) -> int:
    """The least number of rows that was measured and is not below the sessions."""
    return min((rows for rows in rates.host if rows >= sessions), default=max(rates.host))


def _told(rates: HostRates) -> str:
    both = f"both {rates.bus_beside / 1e9:.1f} and {rates.host_beside[1] / 1e9:.1f}"
    return f"bus alone {rates.bus / 1e9:.1f} GB/s, host alone {rates.host[1] / 1e9:.1f}, {both}"


if __name__ == "__main__":
    main()
