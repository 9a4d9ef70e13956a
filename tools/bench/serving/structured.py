"""The cost of following a grammar: tokens a second of sessions with a format, in turns with free generation.

    python -m tools.bench.serving.structured [CHECKPOINT] [--sessions 16] [--record]

Rounds of free generation and of each kind of format take turns, on the same sessions' prompts, so that other work on
the machine falls on all of them. `records` is a JSON schema that forces much of its texts. `letters` is a regular
expression that forces nothing, so each token has a mask and a step of its own: its ratio says how much masks add to a
step. A trace of some more steps tells how long one takes, and for how long the device waits for masks. On a GPU: with a
checkpoint of a real size (tools/make_model.py random), for example llama-3-8b.
"""

from __future__ import annotations

import asyncio
import statistics
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import device_name, private_daemon
from tools.bench.harness.sessions import open_sessions
from tools.bench.harness.trace import traced
from tools.bench.harness.turns import in_turns

RECORDS = {
    "type": "array",
    "minItems": 100_000,
    "items": {
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 20},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "favourite_colour": {"enum": ["red", "green", "blue"]},
        },
        "required": ["first_name", "age", "favourite_colour"],
        "additionalProperties": False,
    },
}
KINDS: dict[str, dict[str, Any]] = {
    "free": {},
    "records": {"response_format": {"type": "json_schema", "schema": RECORDS}},
    "letters": {"regex": r"[a-z \n]{100000}"},
}
TRACE_S = 20.0  # at most, of a hundred steps


async def tokens_per_s(address: str, model: str, sessions: int, tokens: int, options: dict[str, Any]) -> float:
    """The rate of all sessions together, from the first token of any session to the last token of any."""
    async with open_sessions(address, model, sessions) as opened:
        calls = [
            session.generate(
                f"# {number}\n", max_tokens=tokens, ignore_eos=True, temperature=1.0, seed=number, **options
            )
            for number, session in enumerate(opened)
        ]
        replies = await asyncio.gather(*calls)
    generated = sum(reply.usage.generated_tokens for reply in replies)
    assert generated == sessions * tokens, "no output may end before it is long enough"
    first = min(reply.timings.first_token for reply in replies)
    return (generated - sessions) / (max(reply.timings.total for reply in replies) - first)


def steps(address: str, model: str, sessions: int, options: dict[str, Any]) -> dict[str, float]:
    """Traces a hundred steps and looks at the steps with all sessions. `step_ms`: the median time from one step's start
    to the next one's. `masks_ms`: the mean time for which the device waited for masks in a step."""
    with traced(address, TRACE_S) as spans:
        asyncio.run(tokens_per_s(address, model, sessions, 128, options))
        found = spans()
    starts = [span.start_us for span in found if span.track == "step" and span.args["rows"] == sessions]
    waits = [span.duration_us for span in found if span.name == "masks"]
    between = [later - earlier for earlier, later in pairwise(starts)]
    return {
        "step_ms": statistics.median(between) / 1e3,
        "masks_ms": statistics.mean(waits) / 1e3 if waits else 0.0,
    }


def measure(model: str, device: str, memory: str, sessions: int, tokens: int, rounds: int) -> dict[str, Any]:
    with private_daemon({"device": device, "memory": memory}) as address:
        # Without a host tier: steps are slower while its memory is pinned, in the first seconds after a load.
        info = djinn.load(model, host_kv_bytes=0, disk_kv_bytes=0, address=address)

        def rate(kind: str, tokens: int = tokens) -> float:
            return asyncio.run(tokens_per_s(address, info.name, sessions, tokens, KINDS[kind]))

        for kind in KINDS:  # a process starts, graphs are captured
            rate(kind, 16)
        turns = {kind: partial(rate, kind) for kind in KINDS}
        rates = in_turns(turns, rounds, lambda number: say(f"round {number} of {rounds}"))
        traces = {kind: steps(address, info.name, sessions, options) for kind, options in KINDS.items()}
        description = device_name(address)
    medians = {kind: statistics.median(found) for kind, found in rates.items()}
    ratios = {
        kind: statistics.median(one / free for one, free in zip(found, rates["free"], strict=True))
        for kind, found in rates.items()
    }
    found = {"tokens_per_s": medians, "ratio": ratios, "steps": traces, "rounds": rates}
    return found | {"vocab": info.vocab, "device": description}


def table(found: dict[str, Any]) -> Table:
    columns = ("", "tokens/s", "of free generation", "ms a step, traced", "ms waited for masks")
    shown = Table(*columns, caption=f"on {found['device']}")
    for kind, rate in found["tokens_per_s"].items():
        step, waited = found["steps"][kind].values()
        shown.add_row(kind, f"{rate:,.0f}", f"{found['ratio'][kind]:.3f}", f"{step:.2f}", f"{waited:.3f}")
    return shown


@command.bench("structured", __doc__)
@click.argument("checkpoint", default="djinn-tiny")
@command.device
@command.memory
@click.option("--sessions", default=16, show_default=True)
@click.option("--tokens", default=128, show_default=True, help="Tokens that a session generates in a round.")
@command.rounds(7)
def main(checkpoint: str, device: str, memory: str, sessions: int, tokens: int, rounds: int) -> Result:
    model = str(Path(checkpoint).resolve()) if Path(checkpoint).is_dir() else checkpoint
    found = measure(model, device, memory, sessions, tokens, rounds)
    parameters = {"model": Path(checkpoint).name, "sessions": sessions, "tokens": tokens, "rounds": rounds}
    ratios = ", ".join(f"{kind} {ratio:.3f}" for kind, ratio in found["ratio"].items() if kind != "free")
    summary = f"tokens/s of {sessions} sessions, free {found['tokens_per_s']['free']:,.0f}; of that: {ratios}"
    return Result(parameters, found, summary, [table(found)])


if __name__ == "__main__":
    main()
