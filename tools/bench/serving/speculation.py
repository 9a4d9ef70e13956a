"""Decode with and without guesses, on texts that lookup, a draft or nothing can guess.

    python -m tools.bench.serving.speculation CHECKPOINT [--draft CHECKPOINT [--part heads]] [--memory 16GiB]

    loop            a bias makes each token the same: each guess from the text is right, and as long as it may be
    no repetition   tokens are drawn at a high temperature, others in each session
    agreed          1,000 tokens are about equally likely, so a draft with other weights draws mostly the same ones, as
                    it has the same random numbers; lookup finds nothing in such a text

Each text is generated without speculation, with lookup, and with the draft, if there is one. Then the model with lookup
runs two comparisons, each in turns: a pass that verifies a guess of `--verify` tokens, and one of one token; and calls
that may guess text without repetition, and calls that may not.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import bus, command
from tools.bench.harness.command import Result, say
from tools.bench.harness.daemon import private_daemon
from tools.bench.harness.prompts import prompt
from tools.bench.harness.sessions import open_sessions

LOOP: dict[str, Any] = {"logit_bias": {100: 100.0}}
TEXTS = ("loop", "no repetition", "agreed")
VERIFIED_PASSES = 15
DRAFT = "draft"


def sampling_of(text: str, vocab: int) -> dict[str, Any]:
    if text == "loop":
        return LOOP
    if text == "no repetition":
        return {"temperature": 3.0, "logit_bias": {100: -100.0}}  # the bias costs the same as in the loop
    return {"temperature": 10.0, "logit_bias": dict.fromkeys(range(min(1000, vocab)), 100.0)}


class Measured(NamedTuple):
    """A run: tokens a pass of the model, and milliseconds of a pass and of a token."""

    tokens_a_pass: float
    pass_ms: float
    token_ms: float


async def run(address: str, model: str, sessions: int, text: dict[str, Any], work: dict[str, Any]) -> Measured:
    async with open_sessions(address, model, sessions) as opened:
        for seed, session in enumerate(opened):
            await session.generate(
                prompt(work["context"], work["vocab"], seed), max_tokens=work["warm_up"], ignore_eos=True, **text
            )
        replies = await asyncio.gather(
            *(
                each.generate(max_tokens=work["tokens"], ignore_eos=True, seed=seed, **text)
                for seed, each in enumerate(opened)
            )
        )
    seconds = max(reply.timings.total - reply.timings.first_token for reply in replies)
    passes = statistics.mean(reply.usage.generated_tokens - reply.usage.kept_tokens - 1 for reply in replies)
    tokens = statistics.mean(reply.usage.generated_tokens - 1 for reply in replies)
    return Measured(tokens / passes, seconds / passes * 1e3, seconds / tokens * 1e3)


def measured(address: str, way: str, texts: Sequence[str], work: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each number of sessions and text: the run with the median time of a token."""
    for sessions in work["sessions"]:
        for text in texts:
            sampling = sampling_of(text, work["vocab"])
            asyncio.run(run(address, way, sessions, sampling, work))  # warms up, and captures graphs
            runs = [asyncio.run(run(address, way, sessions, sampling, work)) for _ in range(work["runs"])]
            middle = sorted(runs, key=lambda measured: measured.token_ms)[len(runs) // 2]
            say(f"{way}, {sessions} sessions, {text}: {middle}")
            yield {"sessions": sessions, "text": text, **middle._asdict()}


async def verified_ms(address: str, model: str, tokens: int, work: dict[str, Any]) -> tuple[float, float | None]:
    """Milliseconds of a call of one token, and of one that verifies a guess of so many: each runs one pass. None: no
    call verified so many, as guesses seemed too dear."""
    times: dict[int, list[float]] = {1: [], tokens + 1: []}
    async with open_sessions(address, model, 1) as (session,):
        await session.generate(
            prompt(work["context"], work["vocab"], 0), max_tokens=work["warm_up"], ignore_eos=True, **LOOP
        )
        for count in [*times] * VERIFIED_PASSES:
            reply = await session.generate(max_tokens=count, ignore_eos=True, **LOOP)
            if reply.usage.generated_tokens - reply.usage.kept_tokens == 1:
                times[count].append(reply.timings.total * 1e3)
    one, several = times.values()
    return statistics.median(one), statistics.median(several) if several else None


async def looking_ms(address: str, model: str, work: dict[str, Any]) -> tuple[float, float]:
    """Milliseconds of a token without repetition, of calls that may guess and of calls that may not.

    All calls are of one model, as two loads of one checkpoint on a CPU were found to differ by up to 3 %.
    """
    sampling = sampling_of("no repetition", work["vocab"])
    # A call with log probabilities of its prompt has no guesses. This one has no prompt, so it costs nothing else.
    ways: dict[bool, dict[str, Any]] = {True: {}, False: {"prompt_logprobs": 0}}
    times: dict[bool, list[float]] = {may_guess: [] for may_guess in ways}
    for seed in range(work["looks"]):
        for may_guess in sorted(ways, reverse=seed % 2 == 0):
            async with open_sessions(address, model, 1) as (session,):
                start = prompt(work["context"], work["vocab"], 2 * seed + may_guess)
                await session.generate(start, max_tokens=work["warm_up"], ignore_eos=True, **sampling)
                reply = await session.generate(
                    max_tokens=work["tokens"], ignore_eos=True, **sampling, **ways[may_guess]
                )
            seconds = reply.timings.total - reply.timings.first_token
            times[may_guess].append(seconds / (work["tokens"] - 1) * 1e3)
    return statistics.median(times[True]), statistics.median(times[False])


def configured(
    checkpoint: Path, kv_gib: float, draft: Path | None, part: str | None
) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """The ways to guess, each the name of a model, and the models of the daemon's configuration."""
    settings = {"path": str(checkpoint), "host_kv": 0, "disk_kv": 0} | ({"kv": f"{kv_gib}GiB"} if kv_gib else {})
    models: dict[str, dict[str, Any]] = {way: settings | {"speculation": way} for way in ("off", "auto")}
    if draft is None:
        return [*models], models
    models["with draft"] = settings | {"speculation": {"draft": DRAFT}}
    return [*models], models | {DRAFT: {"path": str(draft)} | ({"part": part} if part else {})}


@command.bench("speculation", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.kv_gib
@command.context
@click.option("--draft", type=command.FOLDER, help="A checkpoint with the same tokens.")
@click.option("--part", type=click.Choice(["heads"]), help="The part of the draft's checkpoint that guesses.")
@click.option("--text", "texts", type=click.Choice(TEXTS), default=TEXTS, multiple=True)
@click.option("--verify", default=8, show_default=True, help="Tokens of a guess.")
@click.option("--looks", default=15, show_default=True, help="Calls of each kind that compare looking for guesses.")
@click.option("--warm-up", default=32, show_default=True, help="Tokens that a session generates before a run.")
@click.option("--tokens", default=257, show_default=True, help="Tokens that a session generates in a run.")
@click.option("--runs", default=3, show_default=True)
@click.option("--turns", default=2, show_default=True, help="Loads of each way.")
@click.option("--sessions", default=(1, 16), show_default=True, multiple=True)
def main(
    checkpoint: Path,
    device: str,
    memory: str,
    kv_gib: float,
    draft: Path | None,
    part: str | None,
    texts: tuple[str, ...],
    **work: Any,
) -> Result:
    rates, found = bus.measured_apart(device), list[dict[str, Any]]()
    looks: tuple[float, float] | None = None
    ways, models = configured(checkpoint, kv_gib, draft, part)
    with private_daemon({"device": device, "memory": memory, "models": models}) as address:
        for turn in range(work["turns"]):
            for way in ways:
                info = djinn.load(way, address=address)
                say(f"loaded {info.blocks_streamed} streamed blocks, speculation {way}, {info.notes}")
                each = work | {"vocab": info.vocab}
                found += [{"turn": turn, "speculation": way, **row} for row in measured(address, way, texts, each)]
                if way == "auto":
                    one, several = asyncio.run(verified_ms(address, way, work["verify"], each))
                    say(f"a pass of one token {one:.2f} ms, one that verifies {work['verify']} {_told(several)}")
                    if "no repetition" in texts:
                        looks = asyncio.run(looking_ms(address, way, each))
                djinn.unload(way, address=address)
    table = Table("speculation", "sessions", "text", "tokens a pass", "ms a pass", "ms a token")
    for row in found:
        numbers = (f"{row[name]:.2f}" for name in Measured._fields)
        table.add_row(row["speculation"], str(row["sessions"]), row["text"], *numbers)
    results = {"rows": found, "blocks_streamed": info.blocks_streamed, "streamed_bytes": info.streamed_bytes}
    results |= {"one_ms": one, "verified_ms": several, "looking_ms": looks}
    results |= {"bus_bytes_per_s": rates.up, "memory_bytes_per_s": rates.memory}
    told = [f"a pass that verifies {work['verify']} tokens {_told(several)}, one of one token {one:.2f} ms"]
    if looks:
        told += [f"no repetition: {looks[0]:.3f} ms a token, {looks[1]:.3f} of calls that may not guess"]
    told += [
        f"{row['speculation']}, {row['sessions']} sessions, {row['text']}: {row['token_ms']:.2f} ms a token"
        for row in found
    ]
    drafted = {"draft": draft.name if draft else None, "part": part, "texts": texts}
    parameters = {"model": checkpoint.name, "memory": memory, "kv_gib": kv_gib, **drafted, **work}
    return Result(parameters, results, "; ".join(told), [table])


def _told(ms: float | None) -> str:
    return "was not run" if ms is None else f"{ms:.2f} ms"


if __name__ == "__main__":
    main()
