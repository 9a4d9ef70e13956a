"""How much decoding sessions are delayed by others that leave the device and come back: the time between steps.

It counts from the start of a step with all decoding sessions to the start of the next such step, in the device's trace.
All work of the engine between the two is included. A client's times are no measure, because tokens with
unfinished text are held back. All phases are traced, the undisturbed one too, because a trace has a cost.

Bytes move only if they are not there already. A session that was on the host before leaves without a copy, and a
session whose pages still lie on the device comes back without one. So the first sessions to leave are fresh, and more
sessions take turns than fit.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, NamedTuple

import click

import djinn_client as djinn
from djinn_client.protocol import Span
from tools.bench.harness.paged_model import MODEL, PagedModel

DECODERS = 8
DECODER_PROMPT = 64  # tokens, which fill one page
PRESENT = 5  # other sessions on the device at a time
PACE_S = {"undisturbed": None, "each_second": 1.0, "disturbed": 0.0}  # between two sessions' departures
TRACE_STEPS = 100  # the most steps of one trace
TRACE_S = 1.0  # a trace waits so long after its last step
ENGINE_KNOWS_S = 0.05  # until the engine has begun the trace
STEPS_GO_S = 0.1  # until all decoders are in the steps


class Noticed(NamedTuple):
    """Figures of one phase, from all its traces."""

    median: float  # seconds from step to step
    p99: float
    step_median: float  # of the steps alone, in device time; the rest lies between two steps
    step_p99: float
    idle_median: float  # time of a step outside of prologue, blocks and epilogue: it samples, or waits
    idle_p99: float
    gaps: int
    seconds: float  # all gaps together; the bytes are of copies that began in them
    bytes_up: int
    bytes_down: int


def noticed(traces: Iterable[Sequence[Span]]) -> Noticed:
    """Figures of the gaps within each trace. Raises ClickException where there are fewer than two gaps."""
    gaps: list[float] = []
    steps: list[float] = []
    idle: list[float] = []
    moved = {"promote": 0, "demote": 0}
    for spans in traces:
        ours = [span for span in spans if span.track == "step" and span.args["rows"] == DECODERS]
        starts = sorted(span.start_us for span in ours)
        gaps += [(after - before) / 1e6 for before, after in pairwise(starts)]
        steps += [span.duration_us / 1e6 for span in ours]
        idle += [_idle(span, spans) for span in ours]
        for span in spans:
            way = span.name.split(" ")[0]
            if way in moved and starts and starts[0] <= span.start_us < starts[-1]:
                moved[way] += span.args["bytes"]
    if len(gaps) < 2:
        raise click.ClickException(f"hardly a step had rows of all {DECODERS} decoders: more --steps are needed")
    return Noticed(
        statistics.median(gaps),
        _p99(gaps),
        statistics.median(steps),
        _p99(steps),
        statistics.median(idle),
        _p99(idle),
        len(gaps),
        sum(gaps),
        moved["promote"],
        moved["demote"],
    )


def _idle(step: Span, spans: Sequence[Span]) -> float:
    end = step.start_us + step.duration_us
    computing = [span.duration_us for span in spans if span.track == "compute" and step.start_us <= span.start_us < end]
    return (step.duration_us - sum(computing)) / 1e6


def _p99(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=100, method="inclusive")[98]


class Pagers:
    """Sessions that take turns on the device."""

    def __init__(self, model: PagedModel, arrival_s: float) -> None:
        """`arrival_s`: the time that a session's arrival takes."""
        self._model = model
        self._arrival_s = arrival_s
        self._present: deque[djinn.AsyncSession] = deque()
        self._waiting: deque[djinn.AsyncSession] = deque()

    async def open(self) -> None:
        """Opens so many sessions that the pages of the next one to come have been overwritten by the others."""
        held = -(-self._model.tokens // self._model.info.page_size)
        fit = -(-(self._model.info.pages - DECODERS) // held)
        while len(self._waiting) + PRESENT <= fit:
            self._waiting.append(await _opened(self._model, self._model.tokens))
            await self._waiting[-1].pause("host")

    async def refresh(self, present: int) -> None:
        """Replaces the sessions on the device by `present` fresh ones, which have never left."""
        while self._present:
            await self._present.pop().close()
        while len(self._present) < present:
            self._present.append(await _opened(self._model, self._model.tokens))

    async def take_turns(self, pace_s: float, stop: asyncio.Event) -> int:
        """Lets one session leave and another come, every `pace_s` seconds until `stop`. Returns how many came."""
        moves = 0
        await asyncio.sleep(STEPS_GO_S)
        while not stop.is_set():
            began = time.perf_counter()
            leaves, comes = self._present.popleft(), self._waiting.popleft()
            self._present.append(comes)
            self._waiting.append(leaves)
            await leaves.pause("host")
            await comes.unpause()
            moves += 1
            await asyncio.sleep(self._arrival_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), max(0.0, pace_s - (time.perf_counter() - began)))
        return moves

    async def close(self) -> None:
        for session in (*self._present, *self._waiting):
            await session.close()


def beside(model: PagedModel, seconds_of_copy: float, steps: int, runs: int) -> dict[str, dict[str, Any]]:
    """Sessions decode beside others, in three phases: undisturbed, with one departure and arrival a second, and with as
    many as the bus allows. The pool must have `pool_bytes`. Returns for each phase its figures and `sessions_moved`."""
    return asyncio.run(_beside(model, seconds_of_copy, steps, runs))


def pool_bytes(model: PagedModel, steps: int) -> int:
    """Bytes of a pool that is full with the decoders and the sessions beside them."""
    return model.pool_bytes(*[model.tokens] * PRESENT, *[DECODER_PROMPT + steps] * DECODERS)


async def _beside(model: PagedModel, seconds_of_copy: float, steps: int, runs: int) -> dict[str, dict[str, Any]]:
    decoders = [await _opened(model, DECODER_PROMPT) for _ in range(DECODERS)]
    pagers = Pagers(model, 1.2 * seconds_of_copy)
    traces: dict[str, list[Sequence[Span]]] = {phase: [] for phase in PACE_S}
    moves = dict.fromkeys(PACE_S, 0)

    async def run(client: djinn.Client, pace_s: float | None) -> tuple[list[Sequence[Span]], int]:
        await pagers.refresh(0 if pace_s is None else PRESENT)  # a session that sends nothing for long leaves, too
        stop = asyncio.Event()
        tracing = asyncio.create_task(_trace(client, stop))
        await asyncio.sleep(ENGINE_KNOWS_S)
        turns = None if pace_s is None else asyncio.create_task(pagers.take_turns(pace_s, stop))
        await asyncio.gather(*(_decode(session, steps) for session in decoders))
        stop.set()
        moved = await turns if turns else 0
        return await tracing, moved

    try:
        with djinn.Client(model.address) as client:
            client.ping()
            await pagers.open()
            await run(client, PACE_S["disturbed"])  # warms up
            await asyncio.sleep(model.quiet_s)
            for _ in range(runs):
                for phase, pace_s in PACE_S.items():
                    drawn, moved = await run(client, pace_s)
                    traces[phase] += drawn
                    moves[phase] += moved
    finally:
        await pagers.close()
        for session in decoders:
            await session.close()
    return {phase: noticed(traces[phase])._asdict() | {"sessions_moved": moves[phase]} for phase in PACE_S}


async def _opened(model: PagedModel, tokens: int) -> djinn.AsyncSession:
    session = await djinn.AsyncSession(MODEL, address=model.address).open()
    await session.generate(model.prompt(tokens), max_tokens=1, ignore_eos=True)
    return session


async def _decode(session: djinn.AsyncSession, steps: int) -> None:
    await session.truncate(DECODER_PROMPT)
    async for _ in session.stream(max_tokens=steps, ignore_eos=True):
        pass


async def _trace(client: djinn.Client, stop: asyncio.Event) -> list[Sequence[Span]]:
    """Takes traces one after another, until one has ended after `stop`."""
    traces: list[Sequence[Span]] = []
    while not stop.is_set():
        reply = await asyncio.to_thread(client.trace, steps=TRACE_STEPS, seconds=TRACE_S)
        traces.append(reply.spans)
    return traces
