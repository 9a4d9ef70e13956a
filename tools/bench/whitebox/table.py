"""A table of white-box figures of several models, at several depths, beside the same work in transformers and nnsight.

    python -m tools.bench.whitebox.table CHECKPOINT… [--memory 80GiB] [--prompts 3] [--tokens 8] [--scales 0.9,0.5,2]

accuracy  runs that stop there, at the prompt and at each generated token, and continue untouched: the share of tokens
          equal to an uninterrupted run's. "exact": all log probabilities are equal, bit for bit
dispatch  the delay of another session that decodes, over two steps of the daemon's trace. A call joins the first step.
          It stops there ("hit"), or generates a token and captures ("capture"), and is compared with a call that only
          generates. The part within the first step is shown too. "wherever": the median of all these calls, with its
          interval of 95 % certainty
restore   a generated position has stopped: `resume` to the next token by the client's clock, beside one step of a
          session that does not stop, by the daemon's figure
steering  all positions are scaled there: the share of generated tokens that differ, the Kullback-Leibler divergence of
          the next token's distributions at the prompt's positions, and the relative change of the logits
edited    from a prompt to its last token, with a stop, an edit by the first of the scales, and a resume. A hook in
          transformers and nnsight do the same; the share of their tokens equal to ours is shown, and also without an
          edit, because near ties may swap in bfloat16
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
from rich.console import Console
from rich.table import Table

import djinn_client as djinn
from tools.bench.harness import command
from tools.bench.harness.command import Result, say
from tools.bench.harness.paged_model import PagedModel, daemon_of, loaded
from tools.bench.harness.spread import Median, median
from tools.bench.peers import whitebox_job as white_peers
from tools.bench.stream.outcome import Status
from tools.bench.whitebox import table_measures as measures
from tools.bench.whitebox.resume_inside import depths

POSITIONS = 32  # of a prompt
DISPATCH = 1e-4  # the most seconds
RESTORE = 2.2e-3  # the most seconds beyond a step


class Work(NamedTuple):
    prompts: int
    tokens: int  # generated after each prompt
    scales: list[float]


# --- measured -------------------------------------------------------------------------------------------------------


def measure(checkpoint: Path, device: str, memory: str, work: Work) -> dict[str, Any]:
    with daemon_of(checkpoint, device, memory, {}, None) as address, loaded(address, POSITIONS) as model:
        on = djinn.status(address=address).devices[0]
        texts = [model.prompt(model.tokens) for _ in range(work.prompts)]
        found: dict[str, Any] = {
            "device": on.description,
            "dtype": model.info.dtype,
            "blocks": model.info.blocks,
            "scale": work.scales[0],
            **ours(checkpoint.name, model, texts, work),
        }
    say(f"{checkpoint.name}: transformers and nnsight")
    with tempfile.TemporaryDirectory(prefix="djinnd-bench-") as folder:
        job = white_peers.Job(
            checkpoint=str(checkpoint),
            device=on.name,
            dtype=found["dtype"],
            prompts=texts,
            blocks=[stop["blocks"] for stop in found["stops"]],
            scale=work.scales[0],
            tokens=work.tokens,
            answer=f"{folder}/answer.json",
        )
        answer = white_peers.measure(job, Path(folder))
    return {**found, "transformers": answer.plain, "peers": msgspec.to_builtins(answer.peers, str_keys=True)}


def ours(name: str, model: PagedModel, texts: Sequence[list[int]], work: Work) -> dict[str, Any]:
    at = depths(model.info.blocks, [])
    measures.stopped(model, at[0], model.prompt(model.tokens), work.tokens)  # warms up
    plain = [measures.uninterrupted(model, text, work.tokens) for text in texts]
    unsteered = [measures.steered(model, text, work.tokens) for text in texts]
    stops = []
    for depth in at:
        say(f"{name}: behind {depth} of {model.info.blocks} blocks")
        stopped = [measures.stopped(model, depth, text, work.tokens) for text in texts]
        steered = {
            f"{scale:g}": [measures.steered(model, text, work.tokens, depth, scale) for text in texts]
            for scale in work.scales
        }
        edited = [measures.edited(model, text, work.tokens, depth, work.scales[0]) for text in texts]
        stops.append(
            {
                "blocks": depth,
                "accuracy": measures.share([one.tokens for one in stopped], [one.tokens for one in plain]),
                "same_logprobs": [one.logprobs for one in stopped] == [one.logprobs for one in plain],
                "hit": [seconds for one in stopped for seconds in one.hits],
                "resume": [seconds for one in stopped for seconds in one.resumed],
                "beside": {way: [one._asdict() for one in some] for way, some in measures.beside(model, depth).items()},
                "steered": {scale: measures.effect(unsteered, some) for scale, some in steered.items()},
                "edited": {"seconds": [one.seconds for one in edited], "tokens": [one.tokens for one in edited]},
            }
        )
    return {"step": [one.step for one in plain], "plain": [one.tokens for one in plain], "stops": stops}


# --- what was found -------------------------------------------------------------------------------------------------


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def between(one: Median) -> str:
    return f"{one.value * 1e3:+.3f} ms ({one.low * 1e3:+.3f} to {one.high * 1e3:+.3f})"


def dispatch(stop: dict[str, Any], way: str, what: str = "turn") -> float:
    """Seconds beyond a call that only generates. `what` "step": the part within the step that the call joins."""
    plain, other = (statistics.median(one[what] for one in stop["beside"][name]) for name in ("plain", way))
    return float(other - plain)


def dispatch_anywhere(found: dict[str, Any], way: str) -> Median:
    """Seconds beyond a call that only generates, over the calls at all depths."""
    added = []
    for stop in found["stops"]:
        plain = statistics.median(one["turn"] for one in stop["beside"]["plain"])
        added += [one["turn"] - plain for one in stop["beside"][way]]
    return median(added)


def scatter(found: dict[str, Any]) -> float:
    """The interquartile range of calls that only generate; a smaller difference says nothing."""
    turns = [one["turn"] for stop in found["stops"] for one in stop["beside"]["plain"]]
    low, _, high = statistics.quantiles(turns, n=4, method="inclusive")
    return float(high - low)


def restore_bar(found: dict[str, Any]) -> float:
    """The most seconds of a restore."""
    return float(statistics.median(found["step"]) + RESTORE)


def effect(one: dict[str, float]) -> str:
    return f"{one['differ']:.0%}, {one['divergence']:.2g} nats, {one['change']:.1%}"


def peer(found: dict[str, Any], name: str, stop: dict[str, Any]) -> str:
    """The peer's time, and the share of its tokens equal to ours; or its failure."""
    outcome = found["peers"][name]
    if outcome["status"] != Status.MEASURED:
        return str(outcome["status"])
    edited = outcome["edited"][str(stop["blocks"])]
    same = measures.share(edited["tokens"], stop["edited"]["tokens"])
    return f"{ms(statistics.median(edited['seconds']))}, {same:.0%}"


def notes(found: dict[str, Any]) -> str:
    """The share of the peers' tokens equal to ours without an edit, and the peers' failures."""
    told = []
    if found["transformers"]:
        told.append(f"without an edit {measures.share(found['transformers'], found['plain']):.0%}")
    for name, outcome in found["peers"].items():
        if outcome["status"] != Status.MEASURED:
            told.append(f"{name} {outcome['status']}: {outcome['note']}")
    return "; ".join(told)


def stops_table(name: str, found: dict[str, Any]) -> Table:
    title = f"{name} ({found['blocks']} blocks, {found['dtype']}) on {found['device']}"
    columns = ("behind", "accuracy", "dispatch of a hit", "of a capture", "until the hit", "restore")
    shown = Table(*columns, title=title)
    step = ms(statistics.median(found["step"]))
    anywhere = ", ".join(f"a {way} {between(dispatch_anywhere(found, way))}" for way in ("hit", "capture"))
    shown.caption = (
        f"a step {step}; bars: dispatch {ms(DISPATCH)}, restore {ms(restore_bar(found))}; "
        f"half of the turns without a hit are within {ms(scatter(found))}; wherever: {anywhere}"
    )
    for stop in found["stops"]:
        exact = ", exact" * stop["same_logprobs"]
        added = (
            f"{dispatch(stop, way) * 1e3:+.2f} ms (step {dispatch(stop, way, 'step') * 1e3:+.2f})"
            for way in ("hit", "capture")
        )
        waited = (ms(statistics.median(stop[what])) for what in ("hit", "resume"))
        shown.add_row(f"{stop['blocks']}", f"{stop['accuracy']:.1%}{exact}", *added, *waited)
    return shown


def steering_table(found: dict[str, Any]) -> Table:
    scales = [f"by {scale}" for scale in found["stops"][0]["steered"]]
    shown = Table("scaled behind", *scales, title="Other tokens, divergence, change of the logits")
    for stop in found["stops"]:
        shown.add_row(f"{stop['blocks']}", *(effect(one) for one in stop["steered"].values()))
    return shown


def peers_table(found: dict[str, Any]) -> Table:
    title = f"Stop, scale by {found['scale']:g}, go on for {len(found['plain'][0])} tokens; which of them are ours"
    shown = Table("behind", "djinnd", *found["peers"], title=title, caption=notes(found))
    for stop in found["stops"]:
        ours = ms(statistics.median(stop["edited"]["seconds"]))
        shown.add_row(f"{stop['blocks']}", ours, *(peer(found, name, stop) for name in found["peers"]))
    return shown


def summary(models: dict[str, dict[str, Any]]) -> str:
    return "; ".join(f"{name}: {_summary(found)}" for name, found in models.items())


def _summary(found: dict[str, Any]) -> str:
    stops, half = found["stops"], found["stops"][len(found["stops"]) // 2]
    exact = all(stop["same_logprobs"] for stop in stops)
    told = [f"accuracy {min(stop['accuracy'] for stop in stops):.1%}" + ", exact" * exact]
    for way in ("hit", "capture"):
        added = [dispatch(stop, way) * 1e3 for stop in stops]
        anywhere = between(dispatch_anywhere(found, way))
        told.append(
            f"dispatch of a {way} {min(added):+.2f} to {max(added):+.2f} ms, wherever {anywhere} (of {ms(DISPATCH)})"
        )
    told.append(f"half of the turns without one within {ms(scatter(found))}")
    restored = [statistics.median(stop["resume"]) for stop in stops]
    told.append(f"restore {ms(restored[0])} to {ms(restored[-1])} (of {ms(restore_bar(found))})")
    steered = ", ".join(f"by {scale} {effect(one)}" for scale, one in half["steered"].items())
    told.append(f"scaled behind {half['blocks']} {steered}")
    times = [f"{name} {peer(found, name, half)}" for name in found["peers"]]
    told.append(f"stop, edit, go on there {ms(statistics.median(half['edited']['seconds']))}, {', '.join(times)}")
    return ", ".join(told) + f" ({notes(found)})"


# --- the command ----------------------------------------------------------------------------------------------------


@command.bench("white_table", __doc__)
@click.argument("checkpoints", nargs=-1, required=True, type=command.FOLDER)
@command.device
@command.memory
@click.option("--prompts", type=click.IntRange(1), default=3, show_default=True, help="Prompts of each kind of run.")
@click.option(
    "--tokens", type=click.IntRange(2), default=8, show_default=True, help="Tokens generated after each prompt."
)
@click.option("--scales", default="0.9,0.5,2", show_default=True, help="Factors that activations are scaled by.")
def main(checkpoints: tuple[Path, ...], device: str, memory: str, prompts: int, tokens: int, scales: str) -> Result:
    work = Work(prompts, tokens, [float(scale) for scale in scales.split(",")])
    found: dict[str, dict[str, Any]] = {}
    for checkpoint in checkpoints:
        name = checkpoint.name
        found[name] = measure(checkpoint, device, memory, work)
        Console().print(stops_table(name, found[name]), steering_table(found[name]), peers_table(found[name]))
    return Result({"models": list(found), "memory": memory, **work._asdict()}, found, summary(found))


if __name__ == "__main__":
    main()
