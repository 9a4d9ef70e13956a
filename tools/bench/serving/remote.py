"""Sessions over TLS beside local ones: calls, tokens, windows, models, and what a long way costs.

    python -m tools.bench.serving.remote [--device DEVICE] [--streams 16] [--delay 50] [--record]

Local and remote runs alternate, and medians count. The streams' shares are of two runs that follow each other. Windows
are compared with a plain TLS stream of Python between two processes, measured in the same run. The long way
is a proxy that delays bytes: no kernel module is needed. `remote_links` measures shaped links.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import device_name, private_daemon
from tools.bench.harness.remote import Door, remote_gateway, slow_link, tls_rate
from tools.bench.harness.turns import in_turns
from tools.bench.serving.http import MODEL, TOKENS, Run, native

PINGS = 300
LOGITS = 2000  # tokens of a forward
TLS_BYTES = 256 << 20
LONG_TOKENS = 64  # over the long way


def empty_call(address: str) -> float:
    """Seconds of an empty call, the median."""
    with djinn.Client(address) as client:
        client.ping()
        return statistics.median(timed(client.ping) for _ in range(PINGS))


def forward(address: str) -> float:
    """Seconds of a forward with LOGITS tokens, until its logits are here."""
    with djinn.Session(MODEL, address=address) as s:
        return timed(lambda: s.forward([7] * LOGITS))


def kv(address: str) -> float:
    """Bytes a second of a session's KV, which the daemon has."""
    with djinn.Session(MODEL, address=address) as s:
        s.generate([7] * LOGITS, max_tokens=1)
        nbytes = int(s.kv().pages.nbytes)
        return nbytes / statistics.median(timed(s.kv) for _ in range(5))


def long_way(door: Door, delay_s: float) -> dict[str, float]:
    """With a delay each way: seconds of connecting, of an empty call, and of a breakpoint, and tokens a second."""
    with slow_link(door.port, delay_s) as port:
        began = time.perf_counter()
        with djinn.Session(MODEL, address=door.address(port)) as s:
            opened = time.perf_counter() - began
            calls = statistics.median(timed(s.token_ids) for _ in range(5))
            pieces = [time.perf_counter() for _ in s.stream("x = ", max_tokens=LONG_TOKENS, ignore_eos=True)]
            s.breakpoint("blocks.4.hook_resid_post")
            stop = timed(lambda: s.generate("y", max_tokens=1))
        rate = (len(pieces) - 1) / (pieces[-1] - pieces[0])
        return {"open_s": opened, "call_s": calls, "breakpoint_s": stop, "tokens_per_s": rate}


def timed(act: Callable[[], object]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def measure(device: str, memory: str, streams: int, delay_s: float, rounds: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory(prefix="djinnd-", dir="/tmp") as name,
        private_daemon({"device": device, "memory": memory}, Path(name)) as local,
        remote_gateway(Path(name), local) as door,
    ):
        addresses = {"local": local, "remote": door.address()}
        found: dict[str, Any] = {"device": device_name(local)}
        figures = {"call_s": empty_call, "logits_s": forward, "kv_bytes_per_s": kv}
        for figure, act in figures.items():
            say(figure)
            runs = in_turns({way: partial(act, address) for way, address in addresses.items()}, 1 + rounds)
            found[figure] = {way: statistics.median(each[1:]) for way, each in runs.items()}
        found["tls_bytes_per_s"] = statistics.median(tls_rate(TLS_BYTES) for _ in range(3))
        found["streams"] = {count: _streams(addresses, count, rounds) for count in sorted({1, streams})}
        say(f"{delay_s * 1e3:g} ms each way")
        found["long_way"] = long_way(door, delay_s)
        return found


def _streams(addresses: dict[str, str], count: int, rounds: int) -> dict[str, Any]:
    say(f"{count} streams")
    ways: dict[str, Callable[[], Run]] = {
        way: partial(_run_streams, address, count) for way, address in addresses.items()
    }
    runs = {way: each[1:] for way, each in in_turns(ways, 1 + rounds).items()}
    medians = {way: Run(*map(statistics.median, zip(*each, strict=True)))._asdict() for way, each in runs.items()}
    return {**medians, "shares": shares(runs["local"], runs["remote"])}


def shares(local: Sequence[Run], remote: Sequence[Run]) -> list[float]:
    """The remote client's tokens a second in parts of the local one's, round by round, from the lowest. Both runs of a
    round follow each other, so a change of the machine's speed falls on both."""
    return sorted(there.tokens_per_s / here.tokens_per_s for here, there in zip(local, remote, strict=True))


def _run_streams(address: str, count: int) -> Run:
    return asyncio.run(native(address, count))


def table(found: dict[str, Any]) -> Table:
    shown = Table("", "local", "remote", title=f"{MODEL} on {found['device']}")
    shown.add_row("empty call", *(f"{found['call_s'][way] * 1e6:.0f} µs" for way in ("local", "remote")))
    shown.add_row(f"forward of {LOGITS}", *(f"{found['logits_s'][way] * 1e3:.0f} ms" for way in ("local", "remote")))
    shown.add_row("KV", *(f"{found['kv_bytes_per_s'][way] / 1e6:,.0f} MB/s" for way in ("local", "remote")))
    shown.add_row("a plain TLS stream", "", f"{found['tls_bytes_per_s'] / 1e6:,.0f} MB/s")
    for count, ways in found["streams"].items():
        rates = [f"{ways[way]['tokens_per_s']:,.1f}" for way in ("local", "remote")]
        shown.add_row(f"{count} streams, tokens/s", *rates)
        shown.add_row("  of the local client", "", _share(ways["shares"]))
    return shown


def _share(found: Sequence[float]) -> str:
    return f"{statistics.median(found):.2f} ({found[0]:.2f} to {found[-1]:.2f})"


def summary(found: dict[str, Any], delay_s: float) -> str:
    streams, far = found["streams"], found["long_way"]
    rates = [_share(ways["shares"]) for ways in streams.values()]
    local, remote = (found["call_s"][way] * 1e6 for way in ("local", "remote"))
    share = found["kv_bytes_per_s"]["remote"] / found["tls_bytes_per_s"]
    return (
        f"an empty call {remote:.0f} µs ({local:.0f} locally); tokens/s {' and '.join(rates)} of the local client with "
        f"{' and '.join(map(str, streams))} streams; KV at {share:.2f} of a plain TLS stream; {delay_s * 2e3:g} ms "
        f"away a call {far['call_s'] * 1e3:.0f} ms, a breakpoint {far['breakpoint_s'] * 1e3:.0f} ms, "
        f"{far['tokens_per_s']:.0f} tokens/s"
    )


@command.bench("remote", __doc__)
@command.device
@click.option("--memory", default="1GiB", show_default=True, help="Budget of the daemon.")
@click.option("--streams", default=16, show_default=True, help="Streams at once, beside one alone.")
@click.option("--delay", default=50.0, show_default=True, help="Milliseconds each way of the long way.")
@command.rounds(5)
def main(device: str, memory: str, streams: int, delay: float, rounds: int) -> Result:
    found = measure(device, memory, streams, delay / 1e3, rounds)
    parameters = {"model": MODEL, "streams": streams, "tokens": TOKENS, "delay_ms": delay, "rounds": rounds}
    return Result(parameters, found, summary(found, delay / 1e3), [table(found)])


if __name__ == "__main__":
    main()
