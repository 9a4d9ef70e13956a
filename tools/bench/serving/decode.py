"""Decoding with all weights resident, through the daemon, beside other engines in the same run.

    python -m tools.bench.serving.decode CHECKPOINT [--sessions 1 --sessions 16] [--gguf FILE] [--record]

The others are transformers' generate, vLLM where it is installed (peers/vllm.py), and llama.cpp with the same model in
a GGUF file where its benchmarks are on the PATH (peers/llama_bench.py). vLLM has the daemon's budget of device memory.

First token: a prompt of `--context` tokens in a fresh session, one new token. Decode: seconds between tokens, with all
sessions generating at once after their prompts. The limit is the time to read the weights once at the rate of the
device's memory, measured in the same run (CUDA only). The logits of one prompt are compared with transformers', and
transformers' SDPA with its own eager attention as a yardstick.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import private_daemon
from tools.bench.harness.prompts import prompt
from tools.bench.harness.sessions import open_sessions, step_seconds
from tools.bench.peers import engines
from tools.bench.peers import transformers as peer_transformers
from tools.bench.peers.engines import Decoded
from tools.bench.peers.vllm import Model
from tools.bench.stream.outcome import Status

FIRST_TOKEN_RUNS = 7


def first_token_s(
    address: str, model: str, context: int, vocab: int, pause_s: float = 0.0, seed: int = 0
) -> list[float]:
    """Times of fresh sessions, one after another, without the first one, which warms up. `pause_s` is waited before
    each.

    `seed` draws the first prompt, and `seed + 1` the next one. Prompts of an earlier run would be found in the cache.
    """
    times = []
    for run in range(FIRST_TOKEN_RUNS + 1):
        time.sleep(pause_s)
        with djinn.Session(model, address=address) as session:
            began = time.perf_counter()
            session.generate(prompt(context, vocab, seed + run), max_tokens=1, ignore_eos=True)
            times.append(time.perf_counter() - began)
    return times[1:]


async def decode_s(address: str, model: str, sessions: int, context: int, tokens: int, vocab: int) -> float:
    """Seconds of a step while so many sessions decode."""
    async with open_sessions(address, model, sessions) as opened:
        for seed, session in enumerate(opened):
            await session.generate(prompt(context, vocab, seed), max_tokens=1, ignore_eos=True)
        return await step_seconds(opened, tokens)


def measure_daemon(checkpoint: Path, device: str, memory: str, work: dict[str, Any]) -> dict[str, Any]:
    with private_daemon({"device": device, "memory": memory}) as address:
        model = str(checkpoint)
        began = time.perf_counter()
        say(f"loading {checkpoint.name}")
        # Without a host tier: steps are slower while its memory is pinned, in the first seconds after a load.
        info = djinn.load(model, host_kv_bytes=0, disk_kv_bytes=0, address=address)
        loaded = time.perf_counter() - began
        context, tokens = work["context"], work["tokens"]
        say(f"loaded in {loaded:.1f} s; measuring")
        first = first_token_s(address, model, context, info.vocab)
        steps = {
            n: min(asyncio.run(decode_s(address, model, n, context, tokens, info.vocab)) for _ in range(3))
            for n in work["sessions"]
        }
        with djinn.Session(model, address=address) as session:
            logits = session.forward(prompt(context, info.vocab, 0))
        status = djinn.status(address=address)
    return {
        "load_s": loaded,
        "first_token_ms": statistics.median(first) * 1e3,
        "step_ms": {n: seconds * 1e3 for n, seconds in steps.items()},
        "logits": logits,
        "weight_bytes": info.weight_bytes,
        "dtype": info.dtype,
        "vocab": info.vocab,
        "used_bytes": status.devices[0].used_bytes,
        "budget_bytes": status.devices[0].budget_bytes,
        "device": status.devices[0].description,
        "device_name": status.devices[0].name,
    }


def table(found: dict[str, Any], peer: dict[str, Any], others: dict[str, Decoded], limit_ms: float | None) -> Table:
    limit = "" if limit_ms is None else f"; reading the weights once takes {limit_ms:.2f} ms"
    steps = [f"step of {sessions}" for sessions in found["step_ms"]]
    caption = f"on {found['device']}{limit}"
    shown = Table("", "first token", *steps, "logits, relative error", title="milliseconds", caption=caption)
    shown.add_row("djinnd", *_cells(found["first_token_ms"], found["step_ms"]), f"{peer['logit_error']:.2e}")
    shown.add_row("transformers", *_cells(peer["first_token_ms"], peer["step_ms"]), f"{peer['own_logit_error']:.2e}")
    for name, other in others.items():
        if other.first_token_ms is None:
            shown.add_row(name, other.note or other.status)
        else:
            shown.add_row(name, *_cells(other.first_token_ms, other.step_ms))
    return shown


def _cells(first_token_ms: float, step_ms: dict[int, float]) -> list[str]:
    return [f"{first_token_ms:.1f}", *(f"{step:.2f}" for step in step_ms.values())]


def summary(
    found: dict[str, Any], peer: dict[str, Any], others: dict[str, Decoded], limit_ms: float | None, context: int
) -> str:
    measured = {name: other for name, other in others.items() if other.status is Status.MEASURED}

    def beside(n: int) -> str:
        each = {"transformers": peer["step_ms"][n]} | {name: other.step_ms[n] for name, other in measured.items()}
        return ", ".join(f"{name} {ms:.1f}" for name, ms in each.items())

    steps = (f"{n} session{'s' * (n > 1)} {ms:.2f} ms a step ({beside(n)})" for n, ms in found["step_ms"].items())
    limit = [] if limit_ms is None else [f"limit {limit_ms:.2f} ms"]
    first = f"first token of {context} {found['first_token_ms']:.1f} ms (transformers {peer['first_token_ms']:.1f})"
    own = f"transformers' own two attentions by {peer['own_logit_error']:.1e}"
    error = f"logits differ by {peer['logit_error']:.1e} ({own})"
    return ", ".join([first, *steps, *limit, error])


@command.bench("decode", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.context
@click.option("--tokens", default=65, show_default=True, help="Tokens that a session generates.")
@click.option("--sessions", default=(1, 16), show_default=True, multiple=True)
@command.gguf
def main(checkpoint: Path, device: str, memory: str, gguf: Path | None, **work: Any) -> Result:
    found = measure_daemon(checkpoint, device, memory, work)
    model = Model(
        checkpoint=str(checkpoint),
        dtype=found["dtype"],
        vocab=found["vocab"],
        device=found.pop("device_name"),
        memory=found.pop("budget_bytes"),
    )
    others = engines.decode(model, gguf, work)  # before this process holds device memory
    say("transformers")
    peer = peer_transformers.measure(checkpoint, found["dtype"], found.pop("logits"), prompt, work)
    rate = peer.pop("memory_rate")
    limit_ms = None if rate is None else found["weight_bytes"] / rate * 1e3
    parameters = {"model": checkpoint.name, "dtype": found["dtype"], "weights": "resident", **work}
    results = {"djinnd": found, "transformers": peer, "limit_ms": limit_ms, "memory_bytes_per_s": rate}
    results["engines"] = msgspec.to_builtins(others)
    told = summary(found, peer, others, limit_ms, work["context"])
    return Result(parameters, results, told, [table(found, peer, others, limit_ms)])


if __name__ == "__main__":
    main()
