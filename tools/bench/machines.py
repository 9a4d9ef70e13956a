"""Machines for the simulator: one that is known from docs/results, and whatever a daemon is found to be."""

from __future__ import annotations

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

import djinn_client as djinn
from tools.bench.paged_model import MODEL, PagedModel
from tools.bench.simulated_engine import Curve, Machine

H200_13B = Machine(  # Llama-2-13B, 80 GiB budget: decode and kv of docs/results; beyond 16 rows by arithmetic
    name="H200, Llama-2-13B",
    rows=((1, 0.0073), (16, 0.0087), (256, 0.020)),
    chunk=((0, 0.0), (1, 0.0013), (60, 0.0018), (128, 0.0041), (252, 0.0061), (512, 0.016), (2048, 0.066)),
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

ROWS = (1, 2, 4, 8, 16, 32, 64)
CHUNKS = (32, 64, 128, 256, 512)
SHORT = 16  # tokens of a prompt
JITTERS = 40  # of a step's time, in equal parts of all steps
READERS = 4  # sessions that read much KV
CHUNK = 64  # the same, where what comes before it counts
STEPS = 24  # of a measurement
REPEATS = 7
TOGETHER, TRIES = 3, 10  # of sessions that all decode


async def calibrated(model: PagedModel, limits: tuple[int, int], most_rows: int, *, padded: bool) -> Machine:
    """What the daemon's device takes, as clients see it: with what server and client add to each step. `limits`: tokens
    and rows of its steps; `most_rows`: that the load comes to.
    `padded`: see Machine.kv_padded."""
    sessions = [await _opened(model) for _ in range(most_rows)]
    try:
        await _together(sessions[:2], STEPS)  # warms up
        counts = [n for n in ROWS if n < most_rows] + [most_rows]
        gaps = {n: await _together(sessions[:n], STEPS) for n in counts}
        kv_token, pair = await _reading(model)
        first = [(n, statistics.median([await _first_token(model, n) for _ in range(REPEATS)])) for n in (1, *CHUNKS)]
        up, down = await _moving(model, first[0][1])
    finally:
        for session in sessions:
            await session.close()
    info = model.now()
    by_rows = {n: statistics.median(times) for n, times in gaps.items()}
    read = (SHORT + STEPS / 2) * kv_token  # of each row, in what was measured
    rows = rising([(n, max(seconds - n * read, 1e-6)) for n, seconds in by_rows.items()])
    alone = first[0][1]
    return Machine(
        name="this one",
        rows=rows,
        chunk=rising([(0, 0.0), *((n - 1, max(seconds - alone, 0.0)) for n, seconds in first[1:])]),
        kv_token=kv_token,
        kv_padded=padded,
        pair=pair,
        jitter=tuple(seconds / by_rows[most_rows] for seconds in statistics.quantiles(gaps[most_rows], n=JITTERS + 1)),
        call=max(alone - rows[0][1], 0.0),
        page_size=info.page_size,
        page_bytes=info.page_bytes,
        pages=info.pages,
        host_pages=info.host_pages,
        up=up.rate,
        down=down.rate,
        moving=(up.seconds + down.seconds) / 2,
        max_context=info.max_context,
        max_tokens=limits[0],
        max_rows=limits[1],
    )


def typical(machines: Sequence[Machine]) -> Machine:
    """Of the same device, measured several times, while it was disturbed now and then: each figure's median."""
    names = ("kv_token", "pair", "call", "moving", "up", "down")
    figures = {name: statistics.median(getattr(one, name) for one in machines) for name in names}
    jitter = tuple(statistics.median(some) for some in zip(*(one.jitter for one in machines), strict=True))
    curves = {name: _typical_curve([getattr(one, name) for one in machines]) for name in ("rows", "chunk")}
    return msgspec.structs.replace(machines[0], **figures, **curves, jitter=jitter)


def _typical_curve(curves: Sequence[Curve]) -> Curve:
    """Of curves with points at the same places."""
    return tuple((points[0][0], statistics.median(y for _, y in points)) for points in zip(*curves, strict=True))


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


async def _together(sessions: Sequence[djinn.AsyncSession], new: int, context: int = SHORT) -> list[float]:
    """Seconds between two tokens of sessions that all decode: from when all are there to when one has ended, each. On a
    busy machine one may have ended before the last is there: then once more."""
    found: list[float] = []
    for number in range(TRIES):
        if number >= TOGETHER and found:
            break
        for session in sessions:
            await session.truncate(context)
        runs = await asyncio.gather(*(_times(session, new) for session in sessions))
        begin, end = max(times[0] for times in runs), min(times[-1] for times in runs)
        gaps = [b - a for times in runs for a, b in pairwise(times) if a >= begin and b <= end]
        found += gaps
    return found


async def _first_token(model: PagedModel, tokens: int) -> float:
    session = await djinn.AsyncSession(MODEL, priority="batch", address=model.address).open()
    try:
        began = time.perf_counter()
        return (await _times(session, 1, model.prompt(tokens)))[0] - began
    finally:
        await session.close()


async def _reading(model: PagedModel) -> tuple[float, float]:
    """Seconds that one more token of KV adds to a row's step, and to each token of a chunk."""
    long = min(512, model.info.max_context - 2 * (STEPS + CHUNK))
    steps, chunks = [], []
    for tokens in (SHORT, long):
        sessions = [await _opened(model, tokens) for _ in range(READERS)]
        steps.append(statistics.median(await _together(sessions, STEPS, tokens)) / READERS)
        firsts = []
        for _ in range(REPEATS):
            await sessions[0].truncate(tokens)
            began = time.perf_counter()
            firsts.append((await _times(sessions[0], 1, model.prompt(CHUNK)))[0] - began)
        chunks.append(statistics.median(firsts))
        for session in sessions:
            await session.close()
    more = long - SHORT
    return max(steps[1] - steps[0], 0.0) / more, max(chunks[1] - chunks[0], 0.0) / (more * CHUNK)


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
