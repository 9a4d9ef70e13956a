"""A session goes on whose KV is not on the device: how long until its next token, by its length.

    python -m tools.bench.paging.resume CHECKPOINT [--memory 80GiB] [--tokens 128,512,1024,2048]

recompute   transformers runs the model over all of the session's tokens
manual      transformers, and its KV is copied by hand to pinned memory and back
djinnd      the session's client said IO_WAIT, and says COMPUTE and calls
expected    the same, and the client had said how long it would wait

Here sessions stop between tokens; whitebox/resume_inside.py measures sessions that stop inside the model.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.console import Console
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness.bus import ROOT, measured_apart
from tools.bench.harness.paged_model import SPARE, daemon_of, loaded
from tools.bench.harness.report import keep, report
from tools.bench.paging import kv_measures as measures

WAYS = ("recompute", "manual", "djinnd", "expected")


def measure(
    checkpoint: Path, device: str, memory: str, host_kv: str | None, tokens: Sequence[int], rounds: int
) -> dict[str, Any]:
    bus = measured_apart(device)
    ours: dict[int, dict[str, Any]] = {}
    with daemon_of(checkpoint, bus.device, memory, {} if host_kv is None else {"host_kv": host_kv}, None) as address:
        with loaded(address, max(tokens)) as model:
            lengths = sorted({min(length, model.info.max_context - SPARE) for length in tokens})
            kv_bytes = model.pool_bytes(lengths[-1], lengths[-1])
            dtype = model.info.dtype
        with loaded(address, lengths[-1], kv_bytes, ("host",)) as model:
            for length in lengths:
                say(f"djinnd, {length:,} tokens")
                model.tokens = length
                woken, expected = measures.from_host(model, rounds + 1)[1:], measures.when_expected(model, rounds)
                ours[length] = {
                    "moved": woken[0].nbytes,
                    "copied": all(one.computed == 1 for one in woken),
                    "djinnd": [one.seconds for one in woken],
                    "expected": [one.seconds for one in expected],
                }
        on = djinn.status(address=address).devices[0].description
    say("transformers")
    options = [f"--device={bus.device}", f"--dtype={dtype}", f"--tokens={','.join(map(str, lengths))}"]
    command = [sys.executable, "-m", "tools.bench.peers.resume", str(checkpoint), *options, f"--rounds={rounds}"]
    theirs = msgspec.json.decode(subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout)
    return {
        "device": on,
        "bus": bus.up,
        "sessions": [{**one, **ours[one["tokens"]]} for one in theirs],
    }


def table(name: str, found: dict[str, Any]) -> Table:
    shown = Table("tokens", "KV", *WAYS, title=f"{name} on {found['device']}: ms until the next token")
    shown.caption = f"bus: {found['bus'] / 1e9:.1f} GB/s"
    for session in found["sessions"]:
        times = (f"{statistics.median(session[way]) * 1e3:.1f}" for way in WAYS)
        shown.add_row(f"{session['tokens']:,}", f"{session['nbytes'] / 1e6:,.0f} MB", *times)
    return shown


def summary(found: dict[str, Any]) -> str:
    last = found["sessions"][-1]
    times = ", ".join(f"{way} {statistics.median(last[way]) * 1e3:.1f} ms" for way in WAYS)
    return f"{last['tokens']:,} tokens, {last['nbytes'] / 1e9:.2f} GB of KV, until the next token: {times}"


def say(status: str) -> None:
    click.echo(f"resume: {status}", err=True)


@click.command(help=(__doc__ or "").split("\n\n", 1)[0])
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--device", default="auto", show_default=True)
@click.option("--memory", default="0", show_default=True, help="Budget of the daemon; 0: its default.")
@click.option("--host-kv", help="Host memory for pages; by default the daemon's choice.")
@click.option("--tokens", default="128,512,1024,2048", show_default=True, help="Of a session.")
@click.option("--rounds", default=7, show_default=True, help="Measurements of each figure; the median counts.")
@click.option("--json", "path", type=click.Path(path_type=Path), help="Write the result there.")
@click.option("--record", "recorded", is_flag=True, help="Add it to docs/results.md.")
def main(
    checkpoint: Path,
    device: str,
    memory: str,
    host_kv: str | None,
    tokens: str,
    rounds: int,
    path: Path | None,
    recorded: bool,
) -> None:
    checkpoint, lengths = checkpoint.resolve(), [int(length) for length in tokens.split(",")]
    try:
        found = measure(checkpoint, device, memory, host_kv, lengths, rounds)
    except djinn.DjinnError as error:
        raise click.ClickException(error.message) from error
    Console().print(table(checkpoint.name, found))
    parameters = {"model": checkpoint.name, "memory": memory, "host_kv": host_kv, "tokens": lengths, "rounds": rounds}
    keep(report("resume", parameters, found, summary(found)), path, recorded=recorded)


if __name__ == "__main__":
    main()
