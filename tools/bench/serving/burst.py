"""A burst: many prompts at once, each with an answer of its own.

    python -m tools.bench.serving.burst CHECKPOINT [--sessions 256 --context 512 --tokens 128] [--priority batch]

The rate counts generated tokens, from the first call's begin to the last answer's end, so it has the prefill of all
prompts in it. Each round has new prompts: none is found in the cache of the round before.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

import djinn_client as djinn
from djinn_client.protocol import Class, Generated
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import device_name, private_daemon
from tools.bench.harness.prompts import prompt
from tools.bench.harness.sessions import open_sessions


class Round(NamedTuple):
    tokens_per_s: float
    whole_s: float
    first_token_s: tuple[float, float]  # median and 99th percentile
    between_s: float  # tokens of one answer: the median session's mean


async def burst(
    address: str, model: str, prompts: list[list[int]], tokens: int, priority: Class | None = None
) -> Round:
    async with open_sessions(address, model, len(prompts), priority) as opened:
        began = time.perf_counter()
        calls = [
            session.generate(each, max_tokens=tokens, ignore_eos=True)
            for session, each in zip(opened, prompts, strict=True)
        ]
        replies = await asyncio.gather(*calls)
        whole = time.perf_counter() - began
    return _round(replies, tokens, whole)


def _round(replies: list[Generated], tokens: int, whole: float) -> Round:
    firsts = sorted(reply.timings.first_token for reply in replies)
    late = firsts[min(len(firsts) - 1, round(0.99 * len(firsts)))]
    each = [(reply.timings.total - reply.timings.first_token) / max(1, tokens - 1) for reply in replies]
    return Round(len(replies) * tokens / whole, whole, (statistics.median(firsts), late), statistics.median(each))


@command.bench("burst", __doc__)
@command.checkpoint_or_tiny
@command.device
@command.memory
@click.option("--sessions", default=256, show_default=True)
@click.option("--context", default=512, show_default=True, help="Tokens of each prompt.")
@click.option("--tokens", default=128, show_default=True, help="Tokens of each answer.")
@click.option("--priority", type=click.Choice(["interactive", "agent", "batch"]), help="Class of the sessions.")
@command.rounds(3)
def main(checkpoint: Path, device: str, memory: str, rounds: int, **work: Any) -> Result:
    sessions, context, tokens = work["sessions"], work["context"], work["tokens"]
    found: list[Round] = []
    with private_daemon({"device": device, "memory": memory}) as address:
        info = djinn.load(str(checkpoint), address=address)
        for number in range(rounds + 1):  # the first one compiles kernels and captures graphs
            prompts = [prompt(context, info.vocab, number * sessions + at) for at in range(sessions)]
            found.append(asyncio.run(burst(address, info.name, prompts, tokens, work["priority"])))
            say(f"round {number}: {found[-1].tokens_per_s:,.0f} tokens/s")
        name = device_name(address)
    best = sorted(found[1:])[len(found[1:]) // 2]
    median, late = best.first_token_s
    shown = Table("tokens/s", "whole", "first token, median", "p99", "between tokens", caption=f"on {name}")
    told = (f"{best.whole_s:.1f} s", f"{median:.2f} s", f"{late:.2f} s", f"{1e3 * best.between_s:.1f} ms")
    shown.add_row(f"{best.tokens_per_s:,.0f}", *told)
    summary = (
        f"{best.tokens_per_s:,.0f} tokens/s of {sessions} prompts of {context} at once with {tokens} tokens each; "
        f"whole {best.whole_s:.1f} s, first token {median:.2f} s at the median"
    )
    parameters = {"model": checkpoint.name, "rounds": rounds, **work}
    return Result(parameters, {"rounds": [each._asdict() for each in found], "device": name}, summary, [shown])


if __name__ == "__main__":
    main()
