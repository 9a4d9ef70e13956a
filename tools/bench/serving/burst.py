"""A burst: many prompts at once, each with an answer of its own.

    python -m tools.bench.serving.burst CHECKPOINT [--sessions 256 --context 512 --tokens 128] [--priority batch]

The rate counts generated tokens, from the first call's begin to the last answer's end, so it has the prefill of all
prompts in it. Each round has new prompts: none is found in the cache of the round before. vLLM gets the same bursts and
as much device memory, where it is installed (peers/vllm.py).
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
from tools.bench.harness.daemon import private_daemon
from tools.bench.harness.prompts import prompt
from tools.bench.harness.sessions import open_sessions
from tools.bench.peers import vllm
from tools.bench.peers.vllm import Answer, Load, Ran
from tools.bench.stream.outcome import Status


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
    firsts = [reply.timings.first_token for reply in replies]
    each = [(reply.timings.total - reply.timings.first_token) / max(1, tokens - 1) for reply in replies]
    return round_of(whole, firsts, each, tokens)


def round_of(whole_s: float, first_s: list[float], between_s: list[float], tokens: int) -> Round:
    """`first_s` and `between_s` have a figure for each answer."""
    firsts = sorted(first_s)
    late = firsts[min(len(firsts) - 1, round(0.99 * len(firsts)))]
    rate = len(firsts) * tokens / whole_s
    return Round(rate, whole_s, (statistics.median(firsts), late), statistics.median(between_s))


def of_vllm(rounds: list[Ran], tokens: int) -> list[Round]:
    return [round_of(ran.whole_s, ran.first_s, ran.between_s, tokens) for ran in rounds]


def middle(rounds: list[Round]) -> Round:
    """The round with the median rate."""
    return sorted(rounds)[len(rounds) // 2]


def table(found: dict[str, list[Round]], others: dict[str, Answer], device: str) -> Table:
    """Rows of djinnd and of vLLM, or why vLLM has no figures."""
    shown = Table("", "tokens/s", "whole", "first token, median", "p99", "between tokens", caption=f"on {device}")
    for name, rounds in found.items():
        one = middle(rounds)
        median, late = one.first_token_s
        told = (f"{one.whole_s:.1f} s", f"{median:.2f} s", f"{late:.2f} s", f"{1e3 * one.between_s:.1f} ms")
        shown.add_row(name, f"{one.tokens_per_s:,.0f}", *told)
    for name, answer in others.items():
        if name not in found:
            shown.add_row(name, answer.note or answer.status)
    return shown


@command.bench("burst", __doc__)
@command.checkpoint_or_tiny
@command.device
@command.memory
@click.option("--sessions", default=256, show_default=True)
@command.context
@click.option("--tokens", default=128, show_default=True, help="Tokens of each answer.")
@click.option("--priority", type=click.Choice(["interactive", "agent", "batch"]), help="Class of the sessions.")
@command.rounds(3)
def main(checkpoint: Path, device: str, memory: str, rounds: int, **work: Any) -> Result:
    sessions, context, tokens = work["sessions"], work["context"], work["tokens"]
    ours: list[Round] = []
    with private_daemon({"device": device, "memory": memory}) as address:
        info = djinn.load(str(checkpoint), address=address)
        for number in range(rounds + 1):  # the first one compiles kernels and captures graphs
            prompts = [prompt(context, info.vocab, number * sessions + at) for at in range(sessions)]
            ours.append(asyncio.run(burst(address, info.name, prompts, tokens, work["priority"])))
            say(f"round {number}: {ours[-1].tokens_per_s:,.0f} tokens/s")
        place = djinn.status(address=address).devices[0]
    model = vllm.Model(
        checkpoint=str(checkpoint),
        dtype=info.dtype,
        vocab=info.vocab,
        device=place.name,
        memory=place.budget_bytes,
    )
    load = Load(prompts=sessions, context=context, tokens=tokens, rounds=rounds)
    others = vllm.both_ways(model, [load])
    measured = {name: each for name, each in others.items() if each.status is Status.MEASURED}
    found = {"djinnd": ours[1:]} | {name: of_vllm(each.rounds[0], tokens) for name, each in measured.items()}
    best = middle(found["djinnd"])
    summary = (
        f"{best.tokens_per_s:,.0f} tokens/s of {sessions} prompts of {context} at once with {tokens} tokens each; "
        f"whole {best.whole_s:.1f} s, first token {best.first_token_s[0]:.2f} s at the median"
    )
    summary += "".join(f"; {name} {middle(found[name]).tokens_per_s:,.0f} tokens/s" for name in measured)
    parameters = {"model": checkpoint.name, "rounds": rounds, **work}
    results: dict[str, Any] = {"rounds": [each._asdict() for each in ours], "device": place.description}
    results["engines"] = {name: [each._asdict() for each in found[name]] for name in measured}
    return Result(parameters, results, summary, [table(found, others, place.description)])


if __name__ == "__main__":
    main()
