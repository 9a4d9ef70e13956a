"""Measurements of breakpoints.py on a PagedModel: sessions that stop inside it, and sessions beside them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

import djinn_client as djinn
from djinn_client.protocol import ModelInfo
from djinn_client.protocol.fields.kv_layout import ITEM_BYTES
from tools.bench.harness.paged_model import MODEL, PagedModel
from tools.bench.harness.sessions import generate_all, open_sessions

CONTEXT = 32  # tokens that a session has before a call
CALL = 8  # prompt tokens of a call
STEPS = 8  # steps of the session that does not stop, in each turn
WARM_UP = 10  # calls that do not count


def middle(info: ModelInfo) -> int:
    """The block after which half of the blocks have run."""
    return max(info.blocks // 2, 1) - 1


class Timed(NamedTuple):
    """Seconds."""

    seconds: float
    busy: float  # of them, processor time of this process
    returned: Any


def timed(call: Callable[[], object]) -> Timed:
    began, busy = time.perf_counter(), time.process_time()
    returned = call()
    return Timed(time.perf_counter() - began, time.process_time() - busy, returned)


# --- one session ----------------------------------------------------------------------------------------------------


def stopping(model: PagedModel, calls: int) -> dict[str, list[float]]:
    """Seconds of each call. The cost is the time of `run` and `resume` beyond `generate` beside them, and the further
    processor time of this process, the client. Each hit is released before the next call."""
    found: dict[str, list[float]] = {name: [] for name in ("plain", "run", "resume", "cost", "client")}
    with model.session(CONTEXT) as one, model.session(CONTEXT) as other:
        other.breakpoint(layer=middle(model.info), when="prefill")

        def plain() -> Timed:
            text = model.prompt(CALL)
            call = timed(lambda: one.generate(text, max_tokens=1))
            one.truncate(CONTEXT)
            return call

        def stopped() -> tuple[Timed, Timed]:
            text = model.prompt(CALL)
            run = timed(lambda: other.run(text, max_tokens=1))
            assert isinstance(run.returned, djinn.Hit), run
            resume = timed(lambda: other.resume(max_tokens=1))
            other.truncate(CONTEXT)
            return run, resume

        for number in range(WARM_UP + calls):
            if number % 2:
                call, (run, resume) = plain(), stopped()
            else:
                (run, resume), call = stopped(), plain()
            found["plain"].append(call.seconds)
            found["run"].append(run.seconds)
            found["resume"].append(resume.seconds)
            found["cost"].append(run.seconds + resume.seconds - call.seconds)
            found["client"].append(run.busy + resume.busy - call.busy)
            del run, resume, call  # the hit is released with them
    return {name: seconds[WARM_UP:] for name, seconds in found.items()}


def restoring(model: PagedModel, calls: int) -> dict[str, list[float]]:
    """Seconds of `resume` and of a call for one token by the client's clock, and of a step by the daemon's figure."""
    found: dict[str, list[float]] = {name: [] for name in ("resume", "call", "step")}
    with model.session(CONTEXT) as one, model.session(CONTEXT) as other:
        other.breakpoint(layer=middle(model.info))
        for _ in range(WARM_UP + calls):
            hit = other.run(max_tokens=1)
            assert isinstance(hit, djinn.Hit) and len(hit.positions) == 1, hit
            found["resume"].append(timed(lambda: other.resume(max_tokens=1, ignore_eos=True)).seconds)
            found["call"].append(timed(lambda: one.generate(max_tokens=1, ignore_eos=True)).seconds)
            times = one.generate(max_tokens=STEPS, ignore_eos=True).timings
            found["step"].append((times.total - times.first_token) / (STEPS - 1))
            one.truncate(CONTEXT)
            other.truncate(CONTEXT)
    return {name: seconds[WARM_UP:] for name, seconds in found.items()}


# --- what is there --------------------------------------------------------------------------------------------------


def to_read(info: ModelInfo, nbytes: int) -> tuple[list[str], int]:
    """The fewest points between blocks that have `nbytes` together, and the number of positions.

    It is one point, as in a hit, if the model's context is long enough, and all points if even these have less.
    """
    assert info.points is not None
    row = info.points.width * ITEM_BYTES[info.dtype]  # type: ignore[index]
    longest = info.max_context - 1
    count = min(-(-nbytes // (row * longest)), info.blocks)
    names = [f"blocks.{block}.hook_resid_post" for block in range(info.blocks - count, info.blocks)]
    return names, min(-(-nbytes // (row * count)), longest)


def reading(model: PagedModel, nbytes: int, rounds: int) -> dict[str, Any]:
    """Seconds to copy captured tensors, and as many ordinary ones, into memory that has been touched. The sources have
    not been read before."""
    names, positions = to_read(model.info, nbytes)
    found: dict[str, Any] = {"points": len(names), "positions": positions, "first": [], "plain": []}
    for _ in range(rounds + 1):
        with djinn.Session(MODEL, address=model.address) as session:
            there = list(session.capture(names).run(model.prompt(positions)).values())
        targets, ordinary = ([torch.ones_like(tensor) for tensor in there] for _ in range(2))
        found["first"].append(timed(lambda: _copy(targets, there)).seconds)  # noqa: B023 - called at once
        found["plain"].append(timed(lambda: _copy(targets, ordinary)).seconds)  # noqa: B023
        found["nbytes"] = sum(tensor.nbytes for tensor in there)
    return found | {name: found[name][1:] for name in ("first", "plain")}


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


# --- beside others --------------------------------------------------------------------------------------------------


async def beside(model: PagedModel, others: int, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens a second of the others, always the same sessions, and their loss in each round. The first round warms
    up."""
    found: dict[str, list[float]] = {"idle": [], "stopped": []}
    async with open_sessions(model.address, MODEL, others) as crowd:
        await asyncio.gather(*(session.generate(model.prompt(CONTEXT), max_tokens=1) for session in crowd))
        for number in range(rounds + 1):
            for stops in (False, True) if number % 2 else (True, False):
                found["stopped" if stops else "idle"].append(await _rate(model, crowd, tokens, stops=stops))
    pairs = list(zip(found["idle"], found["stopped"], strict=True))[1:]
    return {
        "idle": [idle for idle, _ in pairs],
        "stopped": [stopped for _, stopped in pairs],
        "lost": [1 - stopped / idle for idle, stopped in pairs],
    }


async def _rate(model: PagedModel, crowd: Sequence[djinn.AsyncSession], tokens: int, *, stops: bool) -> float:
    """The others' rate, from the first one's start to the last one's end. One more session has run its prompt to its
    end or to a breakpoint, and continues after the others."""
    async with djinn.AsyncSession(MODEL, address=model.address) as one:
        if stops:
            await one.breakpoint(layer=middle(model.info))
        assert isinstance(await one.run(model.prompt(CONTEXT), max_tokens=1), djinn.Hit) == stops
        began = time.perf_counter()
        await generate_all(crowd, tokens)
        seconds = time.perf_counter() - began
        if stops:
            assert isinstance(await one.resume(max_tokens=1), djinn.Generated)
    await asyncio.gather(*(session.truncate(CONTEXT) for session in crowd))
    return len(crowd) * tokens / seconds
