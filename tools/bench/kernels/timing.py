"""How kernels are timed: in one captured graph that goes through all blocks, so that no time of the host is in it."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import click
import torch
from torch import Tensor

HEAD_DIM, PAGE_SIZE, DTYPE = 128, 16, torch.bfloat16
LLAMA_13B, LLAMA_8B = (40, 40), (32, 8)  # query and KV heads
COLD = 1.5e9  # bytes that a measurement goes through, where 32 blocks suffice: many times the cache
UNITS = {"GB/s": 1e3, "TFLOP/s": 1e6}  # in units a microsecond
CHOSEN = "chosen"  # by the kernel itself

Variant = tuple[str, Sequence[Callable[[], object]]]  # its name and a launch for each block


@dataclass(frozen=True, slots=True)
class Measured:
    kernel: str
    case: str
    variant: str
    microseconds: float  # one launch, or what stands for one (decode: split and combine)
    rate: float
    unit: str
    share: float | None  # of the copy's rate, or of contiguous attention's speed


def microseconds(launches: Sequence[Callable[[], object]], rounds: int = 10) -> float:
    """Of one of the launches, which run one after another in a captured graph: the median of some rounds."""
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    times: list[float] = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return times[rounds // 2] * 1e3 / len(launches)


def copy_rate() -> float:
    """GB/s of a large copy, bytes read and bytes written both counted: what memory gives at best.

    Not in a graph: there the driver copies with its copy engines, which are slower than the processors.
    """
    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
    for mark in marks:
        target.copy_(source)
        mark.record()
    torch.cuda.synchronize()
    times = sorted(a.elapsed_time(b) for a, b in itertools.pairwise(marks))
    return float(2 * source.numel() / times[len(times) // 2] / 1e6)


@dataclass(frozen=True, slots=True)
class Case:
    """What is measured in some variants, how much work one launch is, and the rate that it is held against."""

    kernel: str
    name: str
    work: float  # bytes or floating-point operations
    unit: str
    best: float | None

    def measure(self, variant: str, launches: Sequence[Callable[[], object]]) -> Measured | None:
        """None for a variant that does not fit the device: that is said, and the sweep goes on."""
        try:
            us = microseconds(launches)
        except Exception as error:
            if variant == CHOSEN:
                raise
            click.echo(f"{self.kernel} {self.name} {variant}: {repr(error)[:160]}", err=True)
            return None
        rate = self.work / us / UNITS[self.unit]
        return Measured(self.kernel, self.name, variant, us, rate, self.unit, rate / self.best if self.best else None)


def variants(
    step: Callable[..., object], blocks: Sequence[tuple[Tensor, Tensor]], options: dict[str, dict[str, Any]]
) -> Iterator[Variant]:
    """The step as the kernel itself chooses, then with each of the options; all are compiled before the first."""
    named = {CHOSEN: step} | {name: partial(step, **option) for name, option in options.items()}
    compile_all([partial(launch, *blocks[0]) for launch in named.values()])
    for name, launch in named.items():
        yield name, [partial(launch, *block) for block in blocks]


def compile_all(launches: Sequence[Callable[[], object]]) -> None:
    """Compiling is most of a sweep, and Triton leaves Python's lock for it. What fails here is told when measured."""

    def attempt(launch: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            launch()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attempt, launches))
    torch.cuda.synchronize()
