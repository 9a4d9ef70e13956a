"""The kernels of a decode step, or of a prompt: how often each is launched, and how long it takes on the device.

    python -m tools.bench.engine.step CHECKPOINT [--memory 16GiB] [--sessions 1] [--json FILE]
    python -m tools.bench.engine.step CHECKPOINT --prompt 8000 --steps 4

The engine runs in a thread of this process, so that torch's profiler sees its kernels, also those of CUDA graphs. On a
CPU, torch's operations are counted instead. The profiler makes a step slower by the clock; so the time of a step is
measured before, without it.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import click
import torch
from rich.table import Table
from torch._C._autograd import DeviceType
from torch._C._profiler import _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from djinnd.config.units import read_size
from djinnd.device import open_device
from djinnd.engine.engine import Engine
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.kernels.compiler import kernel_compiler_for
from djinnd.engine.tuning import STEP_LIMITS
from tools.bench.engine.direct_engine import DirectEngine
from tools.bench.harness import command
from tools.bench.harness.command import Result, say

GIB = 1 << 30
KERNEL_SECONDS = 120.0  # limit for compiling one kernel
SHOWN = 25  # rows of the table
GAPS = ((2_000, "< 2 µs"), (10_000, "< 10 µs"), (100_000, "< 100 µs"))  # nanoseconds


class EngineThread(DirectEngine):
    """The engine in a thread of this process."""

    def _start(self, theirs: socket.socket, device: str, memory: int) -> Callable[[float], object]:
        def serve() -> None:
            channel = ServerChannel(theirs.detach())
            opened = open_device(device, memory)
            try:
                compiler = kernel_compiler_for(opened.torch_device, KERNEL_SECONDS)
                Engine(channel, opened, *STEP_LIMITS[opened.torch_device.type], compiler).serve()
            finally:
                opened.close()
                channel.close()

        thread = threading.Thread(target=serve, name="engine", daemon=True)
        thread.start()
        return thread.join


def gaps_of(spans: Iterable[tuple[str, int, int]], steps: int) -> list[dict[str, Any]]:
    """How long the device was idle between kernels. spans: name, start and end in nanoseconds, of one stream. → by the
    gap's length and the kernel behind it, the most time first: gaps a step, microseconds a step."""
    found: dict[tuple[str, str], list[float]] = {}
    ended = 0
    for name, start, end in sorted(spans, key=lambda span: span[1]):
        if ended and start > ended:
            size = next((size for most, size in GAPS if start - ended < most), "longer")
            found.setdefault((size, name), []).append((start - ended) / 1e3)
        ended = max(ended, end)
    gaps = [
        {"gap": size, "before": name, "gaps": len(each) / steps, "us": sum(each) / steps}
        for (size, name), each in found.items()
    ]
    return sorted(gaps, key=lambda gap: -gap["us"])


def kernels_of(
    run: Callable[[], object], steps: int, *, is_cuda: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Profiles `run`. → the kernels, the one with the most time first: name, launches a step, microseconds a step; and
    the gaps between kernels on a GPU."""
    activity = ProfilerActivity.CUDA if is_cuda else ProfilerActivity.CPU
    with profile(activities=[activity], experimental_config=_ExperimentalConfig(profile_all_threads=True)) as profiled:
        run()
    found = []
    for event in profiled.key_averages():
        microseconds = event.self_device_time_total if is_cuda else event.self_cpu_time_total
        if microseconds > 0:
            found.append({"name": event.key, "launches": event.count / steps, "us": microseconds / steps})
    events = profiled.profiler.kineto_results.events() if is_cuda and profiled.profiler is not None else []
    spans = [
        (event.name(), event.start_ns(), event.end_ns()) for event in events if event.device_type() == DeviceType.CUDA
    ]
    return sorted(found, key=lambda kernel: -kernel["us"]), gaps_of(spans, steps)


def prompts_of(tokens: int, sessions: int, first: int = 0) -> list[list[int]]:
    """No two are equal: a mixture's sessions pick different experts, and no prompt is found in the cache. `first`: the
    number of prompts before."""
    return [
        [100 + (position + 7 * number) % 400 for position in range(tokens)] for number in range(first, first + sessions)
    ]


def read_prompts(engine: DirectEngine, tokens: int, count: int, first: int) -> float:
    """Lets `count` sessions read a prompt each, one after another, with a first token. → milliseconds of one."""
    began = time.perf_counter()
    for number in range(first, first + count):
        with engine.sessions("m", prompts_of(tokens, 1, number)):
            pass
    return (time.perf_counter() - began) / count * 1e3


@command.bench("step", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.kv_gib
@click.option("--sessions", default=1, show_default=True)
@command.context
@click.option("--steps", default=32, show_default=True, help="Steps that are profiled, or prompts.")
@click.option("--prompt", default=0, help="Profile prompts of so many tokens, one after another, instead of steps.")
def main(
    checkpoint: Path, device: str, memory: str, kv_gib: float, sessions: int, context: int, steps: int, prompt: int
) -> Result:
    is_cuda = device != "cpu" and torch.cuda.is_available()
    what = f"a prompt of {prompt} tokens" if prompt else f"a step of {sessions}"
    with EngineThread(device, read_size(memory)) as engine:
        info = engine.load("m", os.fspath(checkpoint), round(kv_gib * GIB))
        if prompt:
            read_prompts(engine, prompt, steps, 0)  # captures the graphs
            ms = read_prompts(engine, prompt, steps, steps)
            kernels, gaps = kernels_of(lambda: read_prompts(engine, prompt, steps, 2 * steps), steps, is_cuda=is_cuda)
        else:
            prompts = prompts_of(context, sessions)
            engine.rate("m", prompts, 2 * steps)  # captures the graphs
            ms = sessions / engine.rate("m", prompts, 2 * steps) * 1e3
            with engine.sessions("m", prompts) as names:
                kernels, gaps = kernels_of(lambda: engine.run(names, steps), steps, is_cuda=is_cuda)
    launches, busy = (sum(kernel[figure] for kernel in kernels) for figure in ("launches", "us"))
    idle = sum(gap["us"] for gap in gaps)
    told = f"{what} takes {ms:.2f} ms: {launches:.0f} launches, {busy / 1e3:.2f} ms of kernels"
    for gap in gaps[: SHOWN // 2]:
        say(f"idle {gap['us']:.0f} µs in {gap['gaps']:.1f} gaps {gap['gap']} before {gap['before'][:60]}")
    say(told)
    unit = "prompt" if prompt else "step"
    table = Table("kernel", f"launches a {unit}", f"µs a {unit}", "µs each", caption=told)
    for kernel in kernels[:SHOWN]:
        each = kernel["us"] / kernel["launches"]
        table.add_row(kernel["name"][:90], f"{kernel['launches']:.1f}", f"{kernel['us']:.0f}", f"{each:.1f}")
    blocks = {"plain": info.blocks_plain, "coded": info.blocks_packed, "streamed": info.blocks_streamed}
    parameters = {"model": checkpoint.name, "memory": memory, "kv_gib": kv_gib, "sessions": sessions, "steps": steps}
    parameters["prompt"] = prompt
    results = {"step_ms": ms, "kernels_ms": busy / 1e3, "idle_ms": idle / 1e3, "launches": launches, "blocks": blocks}
    results |= {"kernels": kernels, "gaps": gaps}
    return Result(parameters | {"context": context}, results, told, [table])


if __name__ == "__main__":
    main()
