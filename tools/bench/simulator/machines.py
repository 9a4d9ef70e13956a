"""Machines for the simulator: one from docs/results, and the measured machine of a daemon."""

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

# Llama-2-13B, 80 GiB budget. Steps and KV are from docs/results. Rows include the 0.5 ms between two steps, and not the
# reading of their KV; beyond 48 rows they are extrapolated.
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
PIECE = 1 << 20  # bytes of a unit, for numbers of similar size
ALIKE = 8  # the fewest steps for one point of a curve
POINTS = 16  # points of the curve of chunks


class Ways(NamedTuple):
    """Costs of the ways to the device and back. See Machine."""

    call: float
    up: float
    down: float
    moving: float


async def ways(model: PagedModel) -> Ways:
    """Measures a daemon without other work, by its clients' clock."""
    session = await _opened(model)
    call = statistics.median([await _round_trip(session) for _ in range(REPEATS * STEPS)])
    await session.close()
    alone = statistics.median([await _first_token(model, 1) for _ in range(REPEATS)])
    up, down = await _moving(model, alone)
    return Ways(call, up.rate, down.rate, (up.seconds + down.seconds) / 2)


def typical(measured: Sequence[Ways]) -> Ways:
    """Medians of several measurements of the same device."""
    return Ways(*map(statistics.median, zip(*measured, strict=True)))


def machine_of(
    steps: Sequence[Step], measured: Ways, info: djinn.ModelInfo, limits: tuple[int, int], *, on_cpu: bool
) -> Machine:
    """Makes a machine whose steps take the measured times, in the order of the load. Reading KV is included in them.

    Jitter is a step's time as a multiple of its curves' time, in the measured order, because a host is slow for a
    while. The cost of heard calls, copied pages and further chunks is not jitter: it falls on the steps that clients
    wait for. `limits`: tokens and rows of a step.
    """
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
    """The curve through the means of parts of equal size."""
    ordered, size = sorted(more, key=itemgetter(0)), max(len(more) // POINTS, ALIKE)
    parts = [ordered[first : first + size] for first in range(0, len(ordered) - size + 1, size)]
    points = [(statistics.fmean(x for x, _ in part), statistics.median(y for _, y in part)) for part in parts]
    return rising([(0, 0.0), *points])


class _More(NamedTuple):
    """Seconds that a step takes beyond its curves. See Machine."""

    hearing: float
    beside: float
    another: float

    def of(self, step: Step) -> float:
        return step.calls * self.hearing + step.copied * self.beside + _others(step) * self.another


def _others(step: Step) -> int:
    return max(step.chunks - 1, 0)


def _more(steps: Sequence[Step], by_itself: Sequence[float]) -> _More:
    """Fits the time of steps beyond `by_itself` by least squares, with a constant for all steps."""
    causes = np.array([(1.0, step.calls, step.copied / PIECE, _others(step)) for step in steps])
    seconds = np.array([step.seconds for step in steps]) - np.array(by_itself)
    _, call, piece, another = np.linalg.lstsq(causes, seconds, rcond=None)[0].clip(0.0).tolist()
    return _More(call, piece / PIECE, another)


def rising(points: Sequence[tuple[float, float]]) -> Curve:
    """Removes falls that are noise: no point of the curve is lower than the one before."""
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
    """Seconds to the engine and back without a step, as a call and its first token travel.

    A first token's time minus a step's would be lost in the differences between steps. The wait for the next step's
    begin is part of a step's time.
    """
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
    """Lines by bytes: seconds until a session's pages are back, beside `alone` (a first token's time), and until they
    have left. After leaving, the device's pages are overwritten, so that they are not found again."""
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
            await session.unpause()
            up.append((await _times(session, 1))[0] - began - alone)
            await session.close()
        ups.append((pages * info.page_bytes, statistics.median(up)))
        downs.append((pages * info.page_bytes, statistics.median(down)))
    return line(ups), line(downs)


class Line(NamedTuple):
    """A fixed time in seconds, and bytes a second beside it."""

    seconds: float
    rate: float


def line(points: Sequence[tuple[float, float]]) -> Line:
    """The line through the first and the last point. If it does not rise, bytes cost nothing."""
    (x0, y0), (x1, y1) = points[0], points[-1]
    if x1 <= x0 or y1 <= y0:
        return Line(max(statistics.fmean(y for _, y in points), 0.0), math.inf)
    rate = (x1 - x0) / (y1 - y0)
    return Line(max(y0 - x0 / rate, 0.0), rate)
