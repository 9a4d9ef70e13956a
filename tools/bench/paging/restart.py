"""The time from the start of a daemon to the first token of a large model: cold, after a crash, after a warm restart.

    python -m tools.bench.paging.restart CHECKPOINT [--memory 0]

A cold start reads the checkpoint. After a crash (SIGKILL) the next daemon finds the weights in shared memory, and so
does the successor of `djinnctl restart --warm`. A warm restart's time counts from the command and includes the old
daemon's end; the new daemon's own part is its uptime at the first token.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.command import Result
from tools.bench.harness.prompts import prompt
from tools.private_daemon import PrivateDaemon

LIMIT_S = 300.0
CONTEXT = 128
VOCAB = 1000  # that prompts are drawn from


def first_token(address: str, model: str) -> list[int]:
    """Generates one token in a new session, as soon as a daemon accepts it."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        try:
            with djinn.Session(model, address=address) as session:
                return session.generate(prompt(CONTEXT, VOCAB, 0), max_tokens=1, ignore_eos=True).token_ids
        except (djinn.ConnectionLost, djinn.Cancelled, djinn.EngineLost, djinn.ShuttingDown):
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


def measure(checkpoint: Path, device: str, memory: str) -> dict[str, Any]:
    config = f"{{device: '{device}', memory: {memory}, models: {{m: {{path: '{checkpoint}'}}}}}}\n"
    seconds: dict[str, float] = {}
    uptimes: dict[str, float] = {}
    tokens: dict[str, list[int]] = {}
    with tempfile.TemporaryDirectory(prefix="djinnd-bench-") as folder:

        def started() -> list[int]:
            daemons.append(PrivateDaemon(Path(folder), config))
            return first_token(daemons[-1].address, "m")

        daemons: list[PrivateDaemon] = []

        def time_to_token(name: str, start: Callable[[], list[int]]) -> djinn.StatusReply:
            began = time.perf_counter()
            tokens[name] = start()
            seconds[name] = time.perf_counter() - began
            status = djinn.status(address=daemons[0].address)
            uptimes[name] = status.uptime_s
            return status

        try:
            os.kill(time_to_token("cold", started).pid, signal.SIGKILL)
            daemons.pop().wait()
            time_to_token("after a crash", started)

            def restarted() -> list[int]:
                with djinn.Client(daemons[0].address) as client:
                    client.restart(warm=True)
                return first_token(daemons[0].address, "m")

            bytes_in_arena = time_to_token("warm restart", restarted).arena_bytes
        finally:
            for daemon in daemons:
                daemon.stop()
    return {
        "seconds": seconds,
        "uptime_s": uptimes,
        "same_token": len(set(map(tuple, tokens.values()))) == 1,
        "arena_bytes": bytes_in_arena,
    }


@command.bench("restart", __doc__)
@command.checkpoint
@command.device
@command.memory
def main(checkpoint: Path, device: str, memory: str) -> Result:
    os.sync()  # a checkpoint that has just been made is mostly unwritten, and the journal would wait behind it
    found = measure(checkpoint, device, memory)
    table = Table("start", "seconds to the first token", "the daemon's uptime then", title=checkpoint.name)
    for name, seconds in found["seconds"].items():
        table.add_row(name, f"{seconds:.2f}", f"{found['uptime_s'][name]:.2f}")
    each = ", ".join(
        f"{name} {seconds:.2f} s (uptime {found['uptime_s'][name]:.2f} s)" for name, seconds in found["seconds"].items()
    )
    token = "the same token" if found["same_token"] else "DIFFERENT TOKENS"
    summary = f"start to first token: {each}; {found['arena_bytes'] / 1e9:.1f} GB in shared memory; {token}"
    return Result({"model": checkpoint.name, "memory": memory, "context": CONTEXT}, found, summary, [table])


if __name__ == "__main__":
    main()
