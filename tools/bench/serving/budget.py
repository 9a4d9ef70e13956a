"""Lowers and raises the device's budget while sessions generate: the time of the change, and whether any token differs.

    python -m tools.bench.serving.budget CHECKPOINT [--memory 40] [--less 20] [--sessions 16]

There are two runs: one undisturbed, and one with the budget lowered after a third of the tokens and raised after two
thirds. All sessions begin in one step, so that batches have the same shape in both. The engine runs without its server.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from rich.table import Table

from djinn_client.protocol import ModelInfo
from tools.bench.engine.direct_engine import DirectEngine
from tools.bench.harness import command
from tools.bench.harness.command import Result
from tools.bench.harness.prompts import prompt
from tools.bench.stream.memory import DeviceMemory, nvml_meter

if TYPE_CHECKING:
    from djinnd.messages import BudgetSet


GIB = 1 << 30


def places(model: ModelInfo) -> str:
    return f"{model.blocks_plain} plain, {model.blocks_packed} packed, {model.blocks_streamed} streamed"


def measure(checkpoint: Path, device: str, memory: int, less: int, work: dict[str, Any]) -> dict[str, Any]:
    prompts = [prompt(work["context"], work["vocab"], seed) for seed in range(work["sessions"])]
    tokens = work["tokens"]
    with DeviceMemory(nvml_meter()) as meter, DirectEngine(device, memory) as engine:
        engine.load("m", str(checkpoint))
        engine.generate("m", prompts, tokens, {})  # captures the graphs
        undisturbed, _ = engine.generate("m", prompts, tokens, {})
        with meter.watch("changes") as watched:
            disturbed, changes = engine.generate("m", prompts, tokens, {tokens // 3: less, 2 * tokens // 3: memory})
    return {
        "changes": [_told(change) for change in changes],
        "sessions_with_the_same_tokens": sum(a == b for a, b in zip(undisturbed, disturbed, strict=True)),
        "peak_bytes": watched.peak,
    }


def _told(change: BudgetSet) -> dict[str, Any]:
    return {
        "budget_bytes": change.budget_bytes,
        "used_bytes": change.used_bytes,
        "seconds": change.seconds,
        "places": places(change.models[0]),
    }


@command.bench("budget", __doc__)
@command.checkpoint
@command.device
@click.option("--memory", default=40.0, show_default=True, help="Budget, in GiB.")
@click.option("--less", default=20.0, show_default=True, help="The lower budget, in GiB.")
@click.option("--sessions", default=16, show_default=True)
@click.option("--context", default=32, show_default=True, help="Tokens of each prompt.")
@click.option("--tokens", default=48, show_default=True, help="Tokens that a session generates.")
@click.option("--vocab", default=32000, show_default=True, help="Prompts are drawn from so many tokens.")
def main(checkpoint: Path, device: str, memory: float, less: float, **work: int) -> Result:
    found = measure(checkpoint, device, int(memory * GIB), int(less * GIB), work)
    table = Table("budget", "in use", "blocks", "seconds", title=f"{checkpoint.name}, {work['sessions']} sessions")
    for change in found["changes"]:
        budget, used = (f"{change[name] / GIB:.2f} GiB" for name in ("budget_bytes", "used_bytes"))
        table.add_row(budget, used, change["places"], f"{change['seconds']:.2f}")
    same = f"{found['sessions_with_the_same_tokens']} of {work['sessions']} sessions have the same tokens"
    down, up = (change["seconds"] for change in found["changes"])
    summary = (
        f"{memory:g} to {less:g} GiB in {down:.2f} s and back in {up:.2f} s under {work['sessions']} sessions: {same}"
    )
    return Result({"model": checkpoint.name, "memory": memory, "less": less, **work}, found, summary, [table, same])


if __name__ == "__main__":
    main()
