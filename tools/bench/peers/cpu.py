"""The CPU as a device: prompts and decoding through the daemon, in turns with transformers' generate in bfloat16.

    OMP_NUM_THREADS=2 python -m tools.bench.peers.cpu CHECKPOINT [--record]

Both have the same threads for their products: OMP_NUM_THREADS, or all cores. A round measures each figure once on each
side, so that other work on the machine falls on both. Ratios above 1 say how many times as fast djinnd is; the median
over the rounds counts.

First token: a prompt of `--prompt` tokens in a fresh session, one new token. Step: seconds between two tokens, after
prompts of `--context` tokens in as many sessions as transformers has rows in its batch.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from transformers import AutoModelForCausalLM

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import device_name, private_daemon
from tools.bench.harness.prompts import prompt
from tools.bench.harness.sessions import open_sessions, step_seconds
from tools.bench.harness.turns import in_turns

MODEL = "m"

Prompts = Callable[[int], list[int]]  # tokens → a prompt that no measurement has had


class Daemon:
    """The model in a daemon on the CPU."""

    def __init__(self, address: str, prompts: Prompts) -> None:
        self._address, self._prompts = address, prompts

    def first_token(self, tokens: int) -> float:
        with djinn.Session(MODEL, address=self._address) as session:
            began = time.perf_counter()
            session.generate(self._prompts(tokens), max_tokens=1, ignore_eos=True)
            return time.perf_counter() - began

    def step(self, sessions: int, context: int, tokens: int) -> float:
        return asyncio.run(self._step(sessions, context, tokens))

    async def _step(self, sessions: int, context: int, tokens: int) -> float:
        async with open_sessions(self._address, MODEL, sessions) as opened:
            for session in opened:
                await session.generate(self._prompts(context), max_tokens=1, ignore_eos=True)
            return await step_seconds(opened, tokens)


class Transformers:
    """The model in this process, in bfloat16."""

    def __init__(self, checkpoint: Path, prompts: Prompts) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
        self._prompts = prompts

    def first_token(self, tokens: int) -> float:
        began = time.perf_counter()
        return self._token_times([self._prompts(tokens)], 1)[0] - began

    def step(self, sessions: int, context: int, tokens: int) -> float:
        times = self._token_times([self._prompts(context) for _ in range(sessions)], tokens)
        return statistics.fmean(later - earlier for earlier, later in pairwise(times))

    def _token_times(self, prompts: Sequence[list[int]], new: int) -> list[float]:
        """When `generate` had each of `new` tokens of the batch."""
        ids, times = torch.tensor(prompts), []

        def told(ids: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
            times.append(time.perf_counter())
            return torch.zeros(len(ids), dtype=torch.bool)

        options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        self._model.generate(ids, attention_mask=torch.ones_like(ids), stopping_criteria=[told], **options)
        return times


def measure(sides: dict[str, Daemon | Transformers], work: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each figure, by the figure and the side. The first round warms up, and is left out."""
    figures: dict[str, Callable[[Daemon | Transformers], float]] = {
        f"first token of {work['prompt']:,}": lambda side: side.first_token(work["prompt"])
    }
    for sessions in work["sessions"]:
        figures[f"step of {sessions}"] = lambda side, n=sessions: side.step(n, work["context"], work["tokens"])  # type: ignore[misc]
    found: dict[str, dict[str, list[float]]] = {}
    for name, figure in figures.items():
        say(name)
        ways = {key: lambda figure=figure, side=side: figure(side) * 1e3 for key, side in sides.items()}
        found[name] = {key: times[1:] for key, times in in_turns(ways, work["rounds"] + 1).items()}
    return found


def ratios(times: dict[str, list[float]]) -> list[float]:
    """For each round, how many times as fast djinnd was."""
    return [theirs / ours for ours, theirs in zip(times["djinnd"], times["transformers"], strict=True)]


def shown(found: dict[str, dict[str, list[float]]], device: str) -> Table:
    table = Table("ms, medians", "djinnd", "transformers", "ratio", "of rounds", caption=device)
    for name, times in found.items():
        each = ratios(times)
        middles = [f"{statistics.median(times[side]):.1f}" for side in ("djinnd", "transformers")]
        table.add_row(name, *middles, f"{statistics.median(each):.2f}", f"{min(each):.2f} to {max(each):.2f}")
    return table


@command.bench("cpu", __doc__)
@command.checkpoint
@command.memory
@command.rounds(5)
@click.option("--dtype", default="auto", show_default=True, help="In which djinnd computes.")
@click.option("--prompt", default=512, show_default=True, help="Tokens of the prompt before a first token.")
@click.option("--context", default=128, show_default=True, help="Tokens of each prompt before decoding.")
@click.option("--tokens", default=33, show_default=True, help="Tokens that a session generates.")
@click.option("--sessions", default=(1, 8), show_default=True, multiple=True, type=int)
def main(checkpoint: Path, memory: str, dtype: str, **work: Any) -> Result:
    models = {MODEL: {"path": str(checkpoint), "dtype": dtype}}
    with private_daemon({"device": "cpu", "memory": memory, "models": models}) as address:
        began, seeds = time.perf_counter(), count()
        info = djinn.load(MODEL, host_kv_bytes=0, disk_kv_bytes=0, address=address)
        say(f"loaded in {time.perf_counter() - began:.1f} s: {info.dtype}, {info.blocks_plain} of {info.blocks} plain")

        def new_prompt(tokens: int) -> list[int]:
            return prompt(tokens, info.vocab, next(seeds))

        sides: dict[str, Daemon | Transformers] = {
            "djinnd": Daemon(address, new_prompt),
            "transformers": Transformers(checkpoint, new_prompt),
        }
        found = measure(sides, work)
        device = device_name(address)
    threads = torch.get_num_threads()
    parameters = {"model": checkpoint.name, "dtype": info.dtype, "threads": threads, "memory": memory, **work}
    middle = {name: statistics.median(ratios(times)) for name, times in found.items()}
    told = ", ".join(f"{name} {ratio:.2f} times as fast as transformers" for name, ratio in middle.items())
    results = {"ms": found, "ratios": middle, "weight_bytes": info.weight_bytes, "device": device}
    return Result(parameters, results, f"{info.dtype}, {threads} threads: {told}", [shown(found, device)])


if __name__ == "__main__":
    main()
