"""The CPU as a device: prompts and decoding through the daemon, in turns with transformers' generate in bfloat16.

    OMP_NUM_THREADS=2 python -m tools.bench.peers.cpu CHECKPOINT [--gguf FILE] [--record]

With --gguf, llama.cpp has its turns too, for the same model in a GGUF file; llama-bench and llama-batched-bench must be
on the PATH. They sample nothing, and their weights are in the file's format.

All have the same threads for their products: OMP_NUM_THREADS, or all cores. A round measures each figure once on each
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
from tools.bench.peers import llama_bench
from tools.bench.peers.llama_bench import LlamaBench, LlamaFailed

MODEL = "m"

LLAMA = "llama.cpp"

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


Side = Daemon | Transformers | LlamaBench


def measure(sides: dict[str, Side], work: dict[str, Any]) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each figure, by the figure and the side. The first round warms up, and is left out."""
    figures: dict[str, Callable[[Side], float]] = {
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


def ratios(times: dict[str, list[float]], peer: str = "transformers") -> list[float]:
    """For each round, how many times as fast djinnd was."""
    return [theirs / ours for ours, theirs in zip(times["djinnd"], times[peer], strict=True)]


def shown(found: dict[str, dict[str, list[float]]], caption: str, absent: dict[str, str]) -> Table:
    """`absent`: why a peer was not measured, by its name."""
    peers = [side for side in next(iter(found.values())) if side != "djinnd"]
    columns = [column for peer in peers for column in (peer, "ratio, of rounds")]
    table = Table("ms, medians", "djinnd", *columns, *absent, caption=caption)
    for name, times in found.items():
        cells = [f"{statistics.median(times['djinnd']):.1f}"]
        for peer in peers:
            each = ratios(times, peer)
            cells.append(f"{statistics.median(times[peer]):.1f}")
            cells.append(f"{statistics.median(each):.2f}, {min(each):.2f} to {max(each):.2f}")
        table.add_row(name, *cells, *absent.values())
    return table


def with_llama(sides: dict[str, Side], gguf: Path, sessions: Sequence[int]) -> dict[str, str]:
    """Adds llama.cpp to the sides, or returns why it cannot be measured, by its name."""
    if program := llama_bench.missing(sessions):
        return {LLAMA: f"{program} is not on the PATH"}
    sides[LLAMA] = LlamaBench(gguf, torch.get_num_threads(), "cpu")
    return {}


@command.bench("cpu", __doc__)
@command.checkpoint
@command.memory
@command.rounds(5)
@click.option("--dtype", default="auto", show_default=True, help="In which djinnd computes.")
@click.option("--prompt", default=512, show_default=True, help="Tokens of the prompt before a first token.")
@click.option("--context", default=128, show_default=True, help="Tokens of each prompt before decoding.")
@click.option("--tokens", default=33, show_default=True, help="Tokens that a session generates.")
@click.option("--sessions", default=(1, 8), show_default=True, multiple=True, type=int)
@command.gguf
def main(checkpoint: Path, memory: str, dtype: str, gguf: Path | None, **work: Any) -> Result:
    models = {MODEL: {"path": str(checkpoint), "dtype": dtype}}
    with private_daemon({"device": "cpu", "memory": memory, "models": models}) as address:
        began, seeds = time.perf_counter(), count()
        info = djinn.load(MODEL, host_kv_bytes=0, disk_kv_bytes=0, address=address)
        say(f"loaded in {time.perf_counter() - began:.1f} s: {info.dtype}, {info.blocks_plain} of {info.blocks} plain")

        def new_prompt(tokens: int) -> list[int]:
            return prompt(tokens, info.vocab, next(seeds))

        sides: dict[str, Side] = {
            "djinnd": Daemon(address, new_prompt),
            "transformers": Transformers(checkpoint, new_prompt),
        }
        absent = {} if gguf is None else with_llama(sides, gguf, work["sessions"])
        try:
            found = measure(sides, work)
        except LlamaFailed as error:
            raise click.ClickException(str(error)) from error
        device = device_name(address)
    threads = torch.get_num_threads()
    parameters = {"model": checkpoint.name, "dtype": info.dtype, "threads": threads, "memory": memory, **work}
    parameters |= command.given(gguf=None if gguf is None else gguf.name)
    peers = [side for side in sides if side != "djinnd"]
    middle = {peer: {name: statistics.median(ratios(times, peer)) for name, times in found.items()} for peer in peers}
    told = "; ".join(
        ", ".join(f"{name} {ratio:.2f} times as fast as {peer}" for name, ratio in each.items())
        for peer, each in middle.items()
    )
    results = {"ms": found, "ratios": middle["transformers"], "weight_bytes": info.weight_bytes, "device": device}
    caption = device if gguf is None else f"{device}; {LLAMA} with {gguf.name}"
    return Result(parameters, results, f"{info.dtype}, {threads} threads: {told}", [shown(found, caption, absent)])


if __name__ == "__main__":
    main()
