"""Times of kernels: in one captured graph that goes through all blocks, so that it contains no host time."""

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
COLD = 1.5e9  # bytes of a measurement where 32 blocks are enough: many times the cache
UNITS = {"GB/s": 1e3, "TFLOP/s": 1e6}  # a unit's amount in a microsecond
CHOSEN = "chosen"  # the variant that the kernel chooses itself

Variant = tuple[str, Sequence[Callable[[], object]]]  # a variant's name, and a launch for each block


@dataclass(frozen=True, slots=True)
class Measured:
    kernel: str
    case: str
    variant: str
    microseconds: float  # of one launch; for decode, of the split and the combining launch together
    rate: float
    unit: str
    share: float | None  # of the copy's rate, or of contiguous attention's speed


def microseconds(launches: Sequence[Callable[[], object]], rounds: int = 10) -> float:
    """Microseconds of one launch. The launches follow each other in a captured graph; the median of the rounds
    counts."""
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
    """GB/s of a large copy, with bytes read and bytes written counted: the best rate of the memory.

    It is not captured: in a graph the driver uses its copy engines, which are slower than the processors.
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
    """A case that is measured in several variants: the work of one launch, and the rate to compare with."""

    kernel: str
    name: str
    work: float  # bytes or floating-point operations
    unit: str
    best: float | None

    def measure(self, variant: str, launches: Sequence[Callable[[], object]]) -> Measured | None:
        """Measures a variant. One that does not fit the device is reported and gives None, and the sweep goes on."""
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
    """The kernel's own choice, then each of the options. All are compiled before the first measurement."""
    named = {CHOSEN: step} | {name: partial(step, **option) for name, option in options.items()}
    compile_all([partial(launch, *blocks[0]) for launch in named.values()])
    for name, launch in named.items():
        yield name, [partial(launch, *block) for block in blocks]


def compile_all(launches: Sequence[Callable[[], object]]) -> None:
    """Compiles in threads: it is most of a sweep's time, and Triton releases Python's lock. The measurement reports
    what fails here."""

    def attempt(launch: Callable[[], object]) -> None:
        with contextlib.suppress(Exception):
            launch()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(attempt, launches))
    torch.cuda.synchronize()
