"""The cost of breakpoints: for the session that stops, for reading its tensors, and for sessions that decode meanwhile.

    python -m tools.bench.whitebox.breakpoints [CHECKPOINT] [--calls 200] [--others 32] [--tokens 64] [--read-mb 64]

stopping   `run` of a few tokens that stops in the middle of the blocks, and `resume` to the first token, in turns with
           `generate` of as many tokens. The cost is the difference: one call, one step and one window more. The
           client's part is its further processor time.
restoring  A generated position has stopped: `resume` to the next token, beside one step of a session that does not
           stop.
reading    All bytes of a capture after its call, beside a copy of as many bytes of ordinary memory.
beside     Tokens a second of others while one session is at a breakpoint, and while it is idle, in turns.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

from tools.bench.harness import command
from tools.bench.harness.bus import measured_apart
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import device_name
from tools.bench.harness.paged_model import daemon_of, loaded
from tools.bench.harness.spread import spread
from tools.bench.whitebox import breakpoint_measures as measures


class Line(NamedTuple):
    """A row of the table."""

    measure: str
    found: str
    bar: str


def lines(found: dict[str, Any]) -> list[Line]:
    """The table's rows, from results."""
    stops, restored, read, rates = (found[name] for name in ("stopping", "restoring", "reading", "beside"))
    step = statistics.median(restored["step"])
    first, plain = (statistics.median(read[name]) for name in ("first", "plain"))
    bytes_read = f"{read['nbytes'] / 1e6:,.0f} MB at {read['points']} of the points"
    lost = sorted(rates["lost"])
    return [
        Line("run that stops, and resume", f"{_ms(stops['run'])}; {_ms(stops['resume'])}", ""),
        Line("generate of as many tokens", _ms(stops["plain"]), ""),
        Line("cost of stopping", _ms(stops["cost"]), "p50 1 ms"),
        Line("of it, the client's", _ms(stops["client"]), ""),
        Line("resume of a decode row", _ms(restored["resume"]), f"p50 {1e3 * step + 2.2:.2f} ms"),
        Line("one step, and a call for one token", f"{_ms(restored['step'])}; {_ms(restored['call'])}", ""),
        Line(f"reading {bytes_read}", f"{first * 1e3:.2f} ms", f"{plain * 1e3 + 1:.2f} ms"),
        Line(
            f"rate that {found['others']} others lose",
            f"{statistics.median(lost):+.1%} ({lost[0]:+.1%} to {lost[-1]:+.1%})",
            "1.0%",
        ),
    ]


def _ms(seconds: Sequence[float]) -> str:
    found = spread(seconds)
    return f"p50 {found.p50 * 1e3:.2f} ms, p99 {found.p99 * 1e3:.2f} ms"


def summary(found: dict[str, Any]) -> str:
    return "; ".join(f"{line.measure} {line.found}{line.bar and f' (of {line.bar})'}" for line in lines(found))


def table(found: dict[str, Any]) -> Table:
    shown = Table("measure", "found", "bar", title=f"{found['name']} on {found['device']}")
    for line in lines(found):
        shown.add_row(*line)
    return shown


def measure(checkpoint: Path, device: str, memory: str, work: dict[str, int]) -> dict[str, Any]:
    """`work`: calls, others, tokens, read_mb, rounds."""
    device = measured_apart(device).device
    with daemon_of(checkpoint, device, memory, {}, None) as address, loaded(address, measures.CONTEXT) as model:
        found: dict[str, Any] = {
            "name": checkpoint.name,
            "device": device_name(address),
            "others": work["others"],
        }
        say("stopping")
        found["stopping"] = measures.stopping(model, work["calls"])
        say("restoring")
        found["restoring"] = measures.restoring(model, work["calls"])
        say("reading")
        found["reading"] = measures.reading(model, work["read_mb"] * 1_000_000, work["rounds"])
        say("beside others")
        found["beside"] = asyncio.run(measures.beside(model, work["others"], work["tokens"], work["rounds"]))
    return found


@command.bench("breakpoints", __doc__)
@command.checkpoint_or_tiny
@command.device
@command.memory
@click.option("--calls", default=200, show_default=True, help="Calls of each kind.")
@click.option("--others", default=32, show_default=True, help="Sessions that decode.")
@click.option("--tokens", default=64, show_default=True, help="Tokens that each of them generates in a round.")
@click.option("--read-mb", default=64, show_default=True, help="Bytes to read, in millions.")
@command.rounds(15)
def main(checkpoint: Path, device: str, memory: str, **work: int) -> Result:
    found = measure(checkpoint, device, memory, work)
    parameters = {"model": found["name"], "device": found["device"], **work}
    return Result(parameters, found, summary(found), [table(found)])


if __name__ == "__main__":
    main()
