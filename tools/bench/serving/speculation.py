"""Decode with and without guesses: text in a loop, and text without repetition.

    python -m tools.bench.serving.speculation CHECKPOINT [--memory 16GiB] [--sessions 1 --sessions 16] [--json FILE]

In the loop, a bias makes each token the same, so that each guess is right and as long as it may be: its pass shows the
cost of rows with several tokens. The other text is drawn at a high temperature, another one in each session. Both run
with and without `speculation`, in turns.
"""

from __future__ import annotations

import asyncio
import statistics
from pathlib import Path
from typing import Any, Literal, NamedTuple

import click
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import bus, command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import private_daemon
from tools.bench.harness.prompts import prompt
from tools.bench.harness.sessions import open_sessions

TEXTS: dict[str, dict[str, Any]] = {
    "loop": {"logit_bias": {100: 100.0}},
    "no repetition": {"temperature": 3.0, "logit_bias": {100: -100.0}},  # the bias costs the same in both
}


class Measured(NamedTuple):
    """A run: tokens a pass of the model, and milliseconds of a pass and of a token."""

    tokens_a_pass: float
    pass_ms: float
    token_ms: float


async def run(address: str, model: str, sessions: int, text: dict[str, Any], work: dict[str, Any]) -> Measured:
    async with open_sessions(address, model, sessions) as opened:
        for seed, session in enumerate(opened):
            await session.generate(
                prompt(work["context"], work["vocab"], seed), max_tokens=work["warm_up"], ignore_eos=True, **text
            )
        replies = await asyncio.gather(
            *(
                each.generate(max_tokens=work["tokens"], ignore_eos=True, seed=seed, **text)
                for seed, each in enumerate(opened)
            )
        )
    seconds = max(reply.timings.total - reply.timings.first_token for reply in replies)
    passes = statistics.mean(reply.usage.generated_tokens - reply.usage.kept_tokens - 1 for reply in replies)
    tokens = statistics.mean(reply.usage.generated_tokens - 1 for reply in replies)
    return Measured(tokens / passes, seconds / passes * 1e3, seconds / tokens * 1e3)


@command.bench("speculation", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.kv_gib
@command.context
@click.option("--warm-up", default=32, show_default=True, help="Tokens that a session generates before a run.")
@click.option("--tokens", default=257, show_default=True, help="Tokens that a session generates in a run.")
@click.option("--runs", default=3, show_default=True)
@click.option("--sessions", default=(1, 16), show_default=True, multiple=True)
@click.option("--only-auto", is_flag=True, help="Leave out the runs without speculation.")
def main(checkpoint: Path, device: str, memory: str, kv_gib: float, only_auto: bool, **work: Any) -> Result:
    rates, found = bus.measured_apart(device), []
    ways: tuple[Literal["auto", "off"], ...] = ("auto",) if only_auto else ("off", "auto")
    with private_daemon({"device": device, "memory": memory}) as address:
        model = str(checkpoint)
        for turn in range(1 if only_auto else 2):
            for way in ways:
                kv_bytes = round(kv_gib * (1 << 30))
                info = djinn.load(
                    model, kv_bytes=kv_bytes, host_kv_bytes=0, disk_kv_bytes=0, speculation=way, address=address
                )
                say(f"loaded {info.blocks_streamed} streamed blocks, speculation {way}")
                for sessions in work["sessions"]:
                    for text, sampling in TEXTS.items():
                        each = work | {"vocab": info.vocab}
                        asyncio.run(run(address, model, sessions, sampling, each))  # warms up, and captures graphs
                        runs = [asyncio.run(run(address, model, sessions, sampling, each)) for _ in range(work["runs"])]
                        middle = sorted(runs, key=lambda measured: measured.token_ms)[len(runs) // 2]
                        row = {"turn": turn, "speculation": way, "sessions": sessions, "text": text}
                        found.append(row | middle._asdict())
                        say(f"{way}, {sessions} sessions, {text}: {middle}")
                djinn.unload(model, address=address)
    table = Table("speculation", "sessions", "text", "tokens a pass", "ms a pass", "ms a token")
    for row in found:
        numbers = (f"{row[name]:.2f}" for name in Measured._fields)
        table.add_row(row["speculation"], str(row["sessions"]), row["text"], *numbers)
    results = {"rows": found, "blocks_streamed": info.blocks_streamed, "streamed_bytes": info.streamed_bytes}
    results |= {"bus_bytes_per_s": rates.up, "memory_bytes_per_s": rates.memory}
    told = "; ".join(
        f"{row['speculation']}, {row['sessions']} sessions, {row['text']}: {row['pass_ms']:.2f} ms a pass"
        for row in found
    )
    return Result({"model": checkpoint.name, "memory": memory, "kv_gib": kv_gib, **work}, results, told, [table])


if __name__ == "__main__":
    main()
