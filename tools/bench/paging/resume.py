"""The time to the next token of a session with KV off the device, by the session's length.

    python -m tools.bench.paging.resume CHECKPOINT [--memory 80GiB] [--tokens 128,512,1024,2048]

recompute   transformers runs the model over all tokens of the session.
manual      transformers, with KV that was copied by hand to pinned memory and is copied back.
djinnd      the client said IO_WAIT, then says COMPUTE and calls.
expected    the same, with the expected duration of the wait.

Here sessions stop between tokens; whitebox/resume_inside.py measures sessions that stop inside the model.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

from tools.bench.harness import command
from tools.bench.harness.apart import output_of
from tools.bench.harness.bus import measured_apart
from tools.bench.harness.command import Result, given, say
from tools.bench.harness.daemon import device_name
from tools.bench.harness.paged_model import SPARE, daemon_of, loaded
from tools.bench.paging import kv_measures as measures

WAYS = ("recompute", "manual", "djinnd", "expected")


def measure(
    checkpoint: Path, device: str, memory: str, host_kv: str | None, tokens: Sequence[int], rounds: int
) -> dict[str, Any]:
    bus = measured_apart(device)
    ours: dict[int, dict[str, Any]] = {}
    with daemon_of(checkpoint, bus.device, memory, given(host_kv=host_kv), None) as address:
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
        on = device_name(address)
    say("transformers")
    options = [f"--device={bus.device}", f"--dtype={dtype}", f"--tokens={','.join(map(str, lengths))}"]
    theirs = msgspec.json.decode(output_of("peers.resume", str(checkpoint), *options, f"--rounds={rounds}"))
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


@command.bench("resume", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.host_kv
@click.option("--tokens", default="128,512,1024,2048", show_default=True, help="Lengths of the session.")
@command.rounds(7)
def main(checkpoint: Path, device: str, memory: str, host_kv: str | None, tokens: str, rounds: int) -> Result:
    lengths = [int(length) for length in tokens.split(",")]
    found = measure(checkpoint, device, memory, host_kv, lengths, rounds)
    parameters = {"model": checkpoint.name, "memory": memory, "host_kv": host_kv, "tokens": lengths, "rounds": rounds}
    return Result(parameters, found, summary(found), [table(checkpoint.name, found)])


if __name__ == "__main__":
    main()
