"""The cost of looking inside the model, for the sessions that do it and for sessions beside them.

    python -m tools.bench.whitebox [CHECKPOINT] [--others 32] [--steered 8] [--prompt 2048]

edited    steered sessions decode in the same steps as others, which are not: without an edit, at one point between
          blocks, at all of these, at one attention. The others' tokens a second are compared, in turns
captured  a prompt is read with and without a capture of each block's output. The difference is shown beside the time of
          the same bytes on the bus
calls     an edit that is made and ended, and a capture of a few tokens
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

import djinn_client as djinn
from djinn_client.protocol import ModelInfo
from tools.bench.harness import command
from tools.bench.harness.bus import measured_apart
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import device_name
from tools.bench.harness.paged_model import MODEL, daemon_of
from tools.bench.harness.prompts import prompt
from tools.bench.harness.sessions import open_sessions
from tools.bench.harness.turns import in_turns

BESIDE_PROMPT = 32  # tokens of sessions that decode together
CALL_PROMPT = 8  # tokens of a capture in `calls`
WAYS = ("plain", "one point", "all blocks", "attention")


class Captured(NamedTuple):
    """Figures of one prompt; seconds are medians."""

    points: int
    nbytes: int
    plain: float  # reading the prompt
    seconds: float  # reading it with the capture, to the tensors


class Calls(NamedTuple):
    """Median seconds."""

    edit: float  # an edit made and ended
    generate: float  # one more token
    capture: float  # `CALL_PROMPT` more tokens, captured at one point


def points_of(info: ModelInfo, way: str) -> list[str]:
    middle = info.blocks // 2
    match way:
        case "one point":
            return [f"blocks.{middle}.hook_resid_post"]
        case "all blocks":
            return ["blocks.*.hook_resid_post"]
        case "attention":
            return [f"blocks.{middle}.hook_attn_out"]
        case _:
            return []


# --- beside others --------------------------------------------------------------------------------------------------


async def others_rate(address: str, info: ModelInfo, way: str, others: int, steered: int, tokens: int) -> float:
    """Tokens a second of the others, from the first one's start to the last one's end."""
    count = others + steered
    async with open_sessions(address, MODEL, count) as sessions:
        points = points_of(info, way)
        if points:
            assert info.points is not None
            vector = [1e-3] * info.points.width
            await asyncio.gather(*(session.steer(points, vector) for session in sessions[others:]))
        texts = [prompt(BESIDE_PROMPT, info.vocab, seed) for seed in range(count)]
        began = time.perf_counter()
        calls = [
            asyncio.ensure_future(session.generate(text, max_tokens=tokens, ignore_eos=True))
            for session, text in zip(sessions, texts, strict=True)
        ]
        await asyncio.gather(*calls[:others])
        seconds = time.perf_counter() - began
        await asyncio.gather(*calls[others:])
        return others * tokens / seconds


def beside(
    address: str, info: ModelInfo, others: int, steered: int, tokens: int, rounds: int
) -> dict[str, dict[str, float]]:
    """For each way, the others' rate and the median of each round's loss against "plain". The first round warms up."""

    def rate(way: str) -> float:
        return asyncio.run(others_rate(address, info, way, others, steered, tokens))

    say(f"beside {others} others, {rounds} rounds")
    rates = in_turns({way: partial(rate, way) for way in WAYS}, 1 + rounds)
    return {
        way: {
            "rate": statistics.median(rates[way][1:]),
            "lost": statistics.median(
                1 - one / plain for one, plain in list(zip(rates[way], rates["plain"], strict=True))[1:]
            ),
        }
        for way in WAYS
    }


# --- captures and calls ---------------------------------------------------------------------------------------------


def captured(address: str, info: ModelInfo, way: str, tokens: int, rounds: int, seeds: Iterator[int]) -> Captured:
    """Measures prompts with and without a capture, each in a session and with a prompt of its own."""
    plain, seconds, points, nbytes = [], [], 0, 0
    for number in range(rounds + 1):
        for capturing in (False, True) if number % 2 else (True, False):
            with djinn.Session(MODEL, address=address) as session:
                text = prompt(tokens, info.vocab, next(seeds))
                began = time.perf_counter()
                if not capturing:
                    session.generate(text, max_tokens=1)
                    plain.append(time.perf_counter() - began)
                    continue
                cache = session.capture(points_of(info, way)).run(text, max_tokens=1)
                seconds.append(time.perf_counter() - began)
                points, nbytes = len(cache), sum(tensor.nbytes for tensor in cache.values())
    return Captured(points, nbytes, statistics.median(plain[1:]), statistics.median(seconds[1:]))


def calls(address: str, info: ModelInfo, rounds: int) -> Calls:
    assert info.points is not None
    (point,), vector = points_of(info, "one point"), [1e-3] * info.points.width
    edits, generated, captures = [], [], []
    with djinn.Session(MODEL, address=address) as session:
        session.generate(prompt(BESIDE_PROMPT, info.vocab, 0), max_tokens=1)
        for number in range(rounds):
            began = time.perf_counter()
            session.steer(point, vector).remove()
            edits.append(time.perf_counter() - began)
            began = time.perf_counter()
            session.generate(max_tokens=1, ignore_eos=True)
            generated.append(time.perf_counter() - began)
            text = prompt(CALL_PROMPT, info.vocab, number)
            began = time.perf_counter()
            session.capture([point]).run(text)
            captures.append(time.perf_counter() - began)
            session.truncate(BESIDE_PROMPT)
    return Calls(*map(statistics.median, (edits, generated, captures)))


# --- what was found -------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> Table:
    shown = Table("way", "others' tokens/s", "lost", title=f"{found['name']} on {found['device']}")
    for way, each in found["beside"].items():
        shown.add_row(way, f"{each['rate']:,.0f}", f"{each['lost']:.1%}")
    shown.caption = _told(found)
    return shown


def _told(found: dict[str, Any]) -> str:
    costs, bus = Calls(**found["calls"]), found["bus"]
    told = [
        f"{one.nbytes / 1e6:,.0f} MB at {one.points} of the points of {found['prompt']:,} tokens: "
        f"{one.seconds * 1e3:.1f} ms, {one.plain * 1e3:.1f} without (bus alone {one.nbytes / bus * 1e3:.1f} ms)"
        for one in (Captured(**each) for each in found["captured"])
    ]
    told.append(
        f"an edit made and ended {costs.edit * 1e3:.2f} ms, a token {costs.generate * 1e3:.2f} ms, a capture of "
        f"{CALL_PROMPT} tokens {costs.capture * 1e3:.2f} ms"
    )
    return "; ".join(told)


def summary(found: dict[str, Any]) -> str:
    lost = (f"{way} {each['lost']:+.1%}" for way, each in found["beside"].items() if way != "plain")
    return (
        f"{found['steered']} sessions steered beside {found['others']}, which lose of their rate: {', '.join(lost)}; "
        + (_told(found))
    )


def measure(
    checkpoint: Path, device: str, memory: str, crowd: tuple[int, int, int], length: int, rounds: int
) -> dict[str, Any]:
    """`crowd`: the number of others and of steered sessions, and the tokens that each generates."""
    bus = measured_apart(device)
    others, steered, tokens = crowd
    with daemon_of(checkpoint, bus.device, memory, {}, None) as address:
        info = djinn.load(MODEL, address=address)
        length = min(length, info.max_context - 1)
        found: dict[str, Any] = {
            "name": checkpoint.name,
            "device": device_name(address),
            "bus": bus.down or bus.up,
            "prompt": length,
            "others": others,
            "steered": steered,
        }
        say("calls")
        found["calls"] = calls(address, info, 20 * rounds)._asdict()
        say("captures")
        seeds = count()
        found["captured"] = [
            captured(address, info, way, length, rounds, seeds)._asdict() for way in ("one point", "all blocks")
        ]
        found["beside"] = beside(address, info, others, steered, tokens, rounds)
    return found


@command.bench("whitebox", __doc__)
@command.checkpoint_or_tiny
@command.device
@command.memory
@click.option("--others", default=32, show_default=True, help="Sessions that decode and are not touched.")
@click.option("--steered", default=8, show_default=True, help="Sessions beside them.")
@click.option("--tokens", default=128, show_default=True, help="Tokens that each of them generates.")
@click.option("--prompt", "length", default=2048, show_default=True, help="Tokens of a prompt that is captured.")
@command.rounds(5)
def main(
    checkpoint: Path, device: str, memory: str, others: int, steered: int, tokens: int, length: int, rounds: int
) -> Result:
    found = measure(checkpoint, device, memory, (others, steered, tokens), length, rounds)
    parameters = {"model": found["name"], "device": found["device"], "tokens": tokens, "rounds": rounds}
    return Result(parameters, found, summary(found), [table(found)])


if __name__ == "__main__":
    main()
