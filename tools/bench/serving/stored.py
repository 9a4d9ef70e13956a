"""Decode of a checkpoint that keeps the codes of its file, beside reading its active bytes once.

    python -m tools.bench.serving.stored CHECKPOINT [--memory 16GiB] [--sessions 1 --sessions 16] [--json FILE]

Active bytes are the stored bytes of all weights that one token is multiplied by: everything but the embedding, and of
the experts the share that a router picks. The limit of a step of one session is the time to read them at the rate of
the device's memory or, for what streams, of the bus, both measured in the same run.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from pathlib import Path
from typing import Any

import click
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import bus, command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import private_daemon
from tools.bench.serving.decode import decode_s, first_token_s

GIB = 1 << 30
WARM_UP_TOKENS = 16
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")


def active_bytes(checkpoint: Path) -> int:
    """Stored bytes of the weights that a token is multiplied by."""
    config = json.loads((checkpoint / "config.json").read_text())
    share = config.get("num_experts_per_tok", 1) / next((config[name] for name in COUNTS if name in config), 1)
    is_tied = config.get("tie_word_embeddings", False)
    total = 0.0
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as read:
            header = json.loads(read.read(int.from_bytes(read.read(8), "little")))
        for name, entry in header.items():
            if name != "__metadata__" and ("embed_tokens" not in name or is_tied):
                begin, end = entry["data_offsets"]
                total += (end - begin) * (share if ".experts." in name else 1)
    return round(total)


async def step_s(address: str, model: str, sessions: int, work: dict[str, Any], vocab: int) -> list[float]:
    """Seconds of a step, one figure a run."""
    context, tokens = work["context"], work["tokens"]
    await decode_s(address, model, sessions, context, WARM_UP_TOKENS, vocab)
    found = [await decode_s(address, model, sessions, context, tokens, vocab) for _ in range(work["runs"])]
    say(f"a step of {sessions}: {statistics.median(found) * 1e3:.2f} ms")
    return found


@command.bench("stored", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.kv_gib
@command.context
@click.option("--tokens", default=65, show_default=True, help="Tokens that a session generates in a run.")
@click.option("--runs", default=3, show_default=True)
@click.option("--sessions", default=(1, 16), show_default=True, multiple=True)
def main(checkpoint: Path, device: str, memory: str, kv_gib: float, **work: Any) -> Result:
    rates, active = bus.measured_apart(device), active_bytes(checkpoint)
    say(f"memory {rates.memory / 1e9:,.0f} GB/s, bus {rates.up / 1e9:.1f} GB/s, {active / 1e9:.2f} GB active")
    with private_daemon({"device": device, "memory": memory}) as address:
        model = str(checkpoint)
        began = time.perf_counter()
        stages: dict[str, float] = {}  # seconds at which each began

        def note(progress: Any) -> None:
            stages.setdefault(progress.stage, time.perf_counter() - began)

        kv_bytes = round(kv_gib * GIB)
        info = djinn.load(model, kv_bytes=kv_bytes, host_kv_bytes=0, disk_kv_bytes=0, on_progress=note, address=address)
        blocks = {"plain": info.blocks_plain, "coded": info.blocks_packed, "streamed": info.blocks_streamed}
        stages["ready"] = time.perf_counter() - began
        say(", ".join(f"{stage} {second:.1f} s" for stage, second in stages.items()))
        say(f"{blocks}, {info.notes}")
        first = first_token_s(address, model, work["context"], info.vocab)
        say(f"first token {statistics.median(first) * 1e3:.1f} ms")
        steps = {n: asyncio.run(step_s(address, model, n, work, info.vocab)) for n in work["sessions"]}
        used = djinn.status(address=address).devices[0].used_bytes
    over_bus = info.streamed_bytes
    limit = max(active - over_bus, 0) / rates.memory + over_bus / rates.up
    ms = {n: statistics.median(each) * 1e3 for n, each in steps.items()}
    results = {
        "first_token_ms": statistics.median(first) * 1e3,
        "step_ms": ms,
        "runs_ms": {n: [run * 1e3 for run in each] for n, each in steps.items()},
        "limit_ms": limit * 1e3,
        "active_bytes": active,
        "bus_bytes": over_bus,
        "used_bytes": used,
        "memory_bytes_per_s": rates.memory,
        "bus_bytes_per_s": rates.up,
        "blocks": blocks,
        "stages_s": stages,
    }
    table = Table("sessions", "ms a step", "times the limit", caption=f"limit of one session {limit * 1e3:.2f} ms")
    for n, each in ms.items():
        table.add_row(str(n), f"{each:.2f}", f"{each / limit / 1e3:.2f}" if n == 1 else "")
    told = ", ".join(f"{n}: {each:.2f} ms" for n, each in ms.items())
    summary = f"a step of {told}; limit of one {limit * 1e3:.2f} ms; first token {results['first_token_ms']:.1f} ms"
    return Result({"model": checkpoint.name, "memory": memory, "kv_gib": kv_gib, **work}, results, summary, [table])


if __name__ == "__main__":
    main()
