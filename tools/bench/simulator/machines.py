"""Machines for the simulator: one that is known from docs/results, and whatever a daemon is found to be."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

import djinn_client as djinn
from tools.bench.harness.paged_model import MODEL, PagedModel
from tools.bench.simulator.engine import Curve, Machine, at
from tools.bench.simulator.traced_steps import Step

# Llama-2-13B, 80 GiB budget: steps and kv of docs/results, rows with the 0.5 ms between two steps and without what
# their KV takes; beyond 48 rows by arithmetic.
H200_13B = Machine(
    name="H200, Llama-2-13B",
    rows=((1, 0.0075), (2, 0.0079), (16, 0.0081), (32, 0.0084), (48, 0.0090), (256, 0.020)),
    chunk=((0, 0.0), (1, 0.0008), (32, 0.001), (64, 0.0015), (128, 0.003), (256, 0.0061), (512, 0.0135), (2048, 0.066)),
    kv_token=0.2e-6,
    call=0.001,
    page_size=16,
    page_bytes=16 * 819_200,
    pages=4200,
    host_pages=13_000,
    up=40e9,
    down=40e9,
    moving=0.001,
    beside=1.6e-12,  # 11.5 % of a step of 9.6 ms at 35 GB/s each way
    max_context=4096,
    max_tokens=2048,
    max_rows=256,
)

SHORT = 16  # tokens of a prompt
STEPS = 24  # of a measurement
REPEATS = 7
PIECE = 1 << 20  # bytes: that numbers are alike
ALIKE = 8  # steps that are one point of a curve, at least
POINTS = 16  # of what prompts add


class Ways(NamedTuple):
    """To the device and back. See Machine."""

    call: float
    up: float
    down: float
    moving: float


async def ways(model: PagedModel) -> Ways:
    """Of a daemon that has nothing else to do, as clients see it."""
    session = await _opened(model)
    call = statistics.median([await _round_trip(session) for _ in range(REPEATS * STEPS)])
    await session.close()
    alone = statistics.median([await _first_token(model, 1) for _ in range(REPEATS)])
    up, down = await _moving(model, alone)
    return Ways(call, up.rate, down.rate, (up.seconds + down.seconds) / 2)


def typical(measured: Sequence[Ways]) -> Ways:
    """Of the same device, measured several times, while it was disturbed now and then."""
    return Ways(*map(statistics.median, zip(*measured, strict=True)))


def machine_of(
    steps: Sequence[Step], measured: Ways, info: djinn.ModelInfo, limits: tuple[int, int], *, on_cpu: bool
) -> Machine:
    """Whose steps take what these took, as they come in the load that they are of: what reading their KV takes is in
    it, and what shakes them comes in the same order, as a host is slow for a while. What makes just those steps longer
    that somebody waits for, as calls are heard, pages copied and several prompts read, is no jitter. `limits`: tokens
    and rows of its steps."""
    alone = [step for step in steps if not step.calls and not step.copied and step.chunks <= 1]
    rows = _curve_of_rows([step for step in alone if not step.further])
    chunk = _curve_of_chunks([(step.further, step.seconds - at(rows, step.rows)) for step in alone if step.further])
    by_itself = [at(rows, step.rows) + at(chunk, step.further) for step in steps]
    more = _more(steps, by_itself)
    taken = [seconds + more.of(step) for step, seconds in zip(steps, by_itself, strict=True)]
    jitter = [round(step.seconds / seconds, 3) for step, seconds in zip(steps, taken, strict=True)]
    return Machine(
        name="this one",
        rows=rows,
        chunk=chunk,
        jitter=tuple(jitter),
        call=measured.call,
        page_size=info.page_size,
        page_bytes=info.page_bytes,
        pages=info.pages,
        host_pages=info.host_pages,
        up=measured.up,
        down=measured.down,
        moving=measured.moving,
        beside=more.beside,
        hearing=more.hearing,
        another=more.another,
        synchronous=on_cpu,
        max_context=info.max_context,
        max_tokens=limits[0],
        max_rows=limits[1],
    )


def _curve_of_rows(steps: Sequence[Step]) -> Curve:
    by_rows: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        by_rows[step.rows].append(step.seconds)
    return rising([(n, statistics.median(some)) for n, some in sorted(by_rows.items()) if len(some) >= ALIKE])


def _curve_of_chunks(more: Sequence[tuple[int, float]]) -> Curve:
    """Through the middles of parts of equal size."""
    ordered, size = sorted(more, key=itemgetter(0)), max(len(more) // POINTS, ALIKE)
    parts = [ordered[first : first + size] for first in range(0, len(ordered) - size + 1, size)]
    points = [(statistics.fmean(x for x, _ in part), statistics.median(y for _, y in part)) for part in parts]
    return rising([(0, 0.0), *points])


class _More(NamedTuple):
    """Seconds that a step takes more. See Machine."""

    hearing: float
    beside: float
    another: float

    def of(self, step: Step) -> float:
        return step.calls * self.hearing + step.copied * self.beside + _others(step) * self.another


def _others(step: Step) -> int:
    return max(step.chunks - 1, 0)


def _more(steps: Sequence[Step], by_itself: Sequence[float]) -> _More:
    """What steps take more than `by_itself`: by least squares, beside what all of them do."""
    causes = np.array([(1.0, step.calls, step.copied / PIECE, _others(step)) for step in steps])
    seconds = np.array([step.seconds for step in steps]) - np.array(by_itself)
    _, call, piece, another = np.linalg.lstsq(causes, seconds, rcond=None)[0].clip(0.0).tolist()
    return _More(call, piece / PIECE, another)


def rising(points: Sequence[tuple[float, float]]) -> Curve:
    """What is measured shakes: no point is lower than the one before."""
    found: list[tuple[float, float]] = []
    for x, y in points:
        found.append((x, max(y, found[-1][1]) if found else y))
    return tuple(found)


async def _opened(model: PagedModel, tokens: int = SHORT) -> djinn.AsyncSession:
    session = await djinn.AsyncSession(MODEL, priority="batch", address=model.address).open()
    await session.generate(model.prompt(tokens), max_tokens=1, ignore_eos=True)
    return session


async def _times(session: djinn.AsyncSession, new: int, prompt: Sequence[int] = ()) -> list[float]:
    times = []
    async for piece in session.stream(list(prompt) or None, max_tokens=new, ignore_eos=True):
        times += [time.perf_counter()] * len(piece.token_ids)
    return times


async def _round_trip(session: djinn.AsyncSession) -> float:
    """To the engine and back, as a call and its first token go; less the step. (What a first token takes more than a
    step is lost in how much steps differ; and whether a call comes a moment before a step begins, or after, is a
    step's time.)"""
    began = time.perf_counter()
    await session.why()
    return time.perf_counter() - began


async def _first_token(model: PagedModel, tokens: int) -> float:
    session = await djinn.AsyncSession(MODEL, priority="batch", address=model.address).open()
    try:
        began = time.perf_counter()
        return (await _times(session, 1, model.prompt(tokens)))[0] - began
    finally:
        await session.close()


async def _moving(model: PagedModel, alone: float) -> tuple[Line, Line]:
    """Of a session's pages, by their bytes: seconds until they are back, beside `alone`, those of a first token, and
    until they have left. What has left the device is overwritten there, so that it is not found again."""
    ups, downs = [], []
    size, info = model.info.page_size, model.info
    most = max(min((info.max_context - SHORT) // size, info.pages - 2), 1)
    for pages in (1, most):
        up, down = [], []
        for _ in range(REPEATS):
            session = await _opened(model, pages * size - 2)
            began = time.perf_counter()
            await session.pause("host")
            down.append(time.perf_counter() - began)
            await asyncio.to_thread(model.overwrite)
            began = time.perf_counter()
            await session.resume()
            up.append((await _times(session, 1))[0] - began - alone)
            await session.close()
        ups.append((pages * info.page_bytes, statistics.median(up)))
        downs.append((pages * info.page_bytes, statistics.median(down)))
    return line(ups), line(downs)


class Line(NamedTuple):
    """Seconds that something takes whatever its size, and bytes a second beside that."""

    seconds: float
    rate: float


def line(points: Sequence[tuple[float, float]]) -> Line:
    """Through the first and the last; where that does not rise, only the bytes count for nothing."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    if x1 <= x0 or y1 <= y0:
        return Line(max(statistics.fmean(y for _, y in points), 0.0), math.inf)
    rate = (x1 - x0) / (y1 - y0)
    return Line(max(y0 - x0 / rate, 0.0), rate)
