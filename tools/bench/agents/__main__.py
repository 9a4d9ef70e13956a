"""Agents that reason, wait for a tool, and reflect: more of them than fit the device, and what the daemon makes of
being told what they do.

    python -m tools.bench.agents CHECKPOINT [--memory 80GiB] [--crowd 80x2048 --crowd 200x1024] [--loops 4]
                                 [--arrivals 80 --rate 0.2] [--reference-memory 130GiB] [--peer]

A crowd is alive all the time: each agent has a context, and loops through a tool, its observation and an answer.
Arrivals are a Poisson process: each agent asks, uses a tool once, reflects, and leaves. Before each, when some agents
have made the daemon compile and capture what it will run, one alone says what a step takes undisturbed; then every way
of telling the daemon (sessions.py) is tried, in one daemon, with the same tools' times and other tokens.

The model is served without its tokenizer, so that a client hears of each token at once, and not when its text is
certain. A wake-up is from the tool's end, before COMPUTE is said, to the first token in the agents' process.

--reference-memory  the crowds again in a daemon where all agents fit, or as many as do: to compare answers an agent
--peer              transformers' continuous batching, with as much device and host memory for KV (peers/batching.py),
                    or --peer-host-gib: torch rounds each of its 2 x blocks tensors up to a power of two
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec

from tools.bench.agents.daemons import Setting, warm_up, with_room, with_tiers
from tools.bench.agents.peer import BatchingJob, batched
from tools.bench.agents.plan import Work
from tools.bench.agents.results import WIDTH, Results, summary, tables
from tools.bench.agents.sessions import Way
from tools.bench.harness import command
from tools.bench.harness.bus import measured_apart
from tools.bench.harness.command import Result, given, say
from tools.bench.harness.paged_model import without_text

SMOKE: dict[str, Any] = {  # with djinn-tiny, on two cores, in two minutes
    "memory": "512MiB",
    "kv": "7MiB",
    "host_kv": "64MiB",
    "disk_kv": "64MiB",
    "crowds": ["4x300", "12x300"],
    "observation": 16,
    "answer": 12,
    "loops": 3,
    "arrivals": 8,
    "context": 300,
    "time_scale": 0.05,
    "reference_memory": "512MiB",
    "peer": True,
}


class Peer(NamedTuple):
    """What transformers' continuous batching may have."""

    run_s: float  # after which a run is broken off, and what has been answered counts
    host_bytes: int | None  # for KV; None: as many as the daemon has


def measure(
    checkpoint: Path,
    setting: Setting,
    works: Sequence[Work],
    ways: Sequence[Way],
    reference_memory: str | None,
    peer: Peer | None,
) -> Results:
    say("the bus")
    bus = measured_apart(setting.device, "--both-ways")
    with tempfile.TemporaryDirectory(prefix="djinnd-bench-") as folder:
        bare = without_text(checkpoint, Path(folder))
        found = with_tiers(bare, setting, bus, works, ways)
        if reference_memory is not None:
            with_room(bare, setting._replace(memory=reference_memory, model={}), found)
        if peer is not None:
            say("transformers")
            with_peer(bare, bus.device, found, Path(folder), peer)
    return found


def with_peer(checkpoint: Path, device: str, found: Results, folder: Path, peer: Peer) -> None:
    job = BatchingJob(
        checkpoint=str(checkpoint),
        device=device,
        dtype=found.dtype,
        kv_tokens=found.pages["device"] * found.page_size,
        host_bytes=found.pages["host"] * found.page_bytes if peer.host_bytes is None else peer.host_bytes,
        warm_up=warm_up(found.tried[0].work),
        works=[tried.work for tried in found.tried],
        run_s=peer.run_s,
        outcome=str(folder / "batching.json"),
    )
    found.peer = batched(job, folder)
    for tried, run in zip(found.tried, found.peer.runs, strict=False):  # none, where it has failed
        tried.peer = run


# --- the command ------------------------------------------------------------------------------------------------------


def crowd_of(text: str) -> tuple[int, int]:
    """Agents, and tokens of each one's context. Raises BadParameter."""
    found = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    if not found:
        raise click.BadParameter(f"{text!r} is not AGENTSxTOKENS, as in 80x2048")
    return int(found[1]), int(found[2])


def ways_of(text: str) -> list[Way]:
    """Raises BadParameter."""
    try:
        return [Way(name) for name in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{error}: there are {', '.join(Way)}") from error


def works_of(
    crowds: Sequence[str], arrivals: int, context: int, rate: float, scale: float, each: dict[str, Any]
) -> list[Work]:
    """`scale` stretches time: the tools', and that between arrivals."""
    tool_s = (each["tool_s"][0] * scale, each["tool_s"][1] * scale)
    lengths = {"observation": each["observation"], "answer": each["answer"], "tool_s": tool_s, "seed": each["seed"]}
    works = [
        Work(agents=agents, context=tokens, loops=each["loops"], **lengths) for agents, tokens in map(crowd_of, crowds)
    ]
    if arrivals:
        works.append(Work(agents=arrivals, context=context, loops=1, rate=rate / scale, **lengths))
    return works


def preset(context: click.Context, option: click.Parameter, chosen: bool) -> None:
    """Of --smoke: other defaults."""
    if chosen:
        context.default_map = SMOKE


@command.bench("agents", __doc__, width=WIDTH)
@command.checkpoint
@click.option("--smoke", is_flag=True, is_eager=True, expose_value=False, callback=preset, help="Small figures.")
@command.device
@click.option("--memory", default="80GiB", show_default=True, help="Budget of the daemon.")
@click.option("--kv", help="Device memory for pages; by default all that the weights leave.")
@command.host_kv
@command.disk_kv
@click.option("--keep-host/--no-keep-host", default=True, help="The weights stay in host memory, too.  [default: yes]")
@click.option("--paging", type=float, help="The daemon's scheduling.paging; by default its choice.")
@click.option("--crowd", "crowds", multiple=True, default=["80x2048", "200x1024"], show_default=True)
@click.option("--loops", default=4, show_default=True, help="Of each agent of a crowd.")
@click.option("--tool-s", nargs=2, type=float, default=(10.0, 20.0), show_default=True, help="That a tool takes.")
@click.option("--observation", default=64, show_default=True, help="Tokens that a tool brings.")
@click.option("--answer", default=50, show_default=True, help="Tokens of an answer.")
@click.option("--arrivals", default=0, show_default=True, help="Agents that arrive, in all; 0: none.")
@click.option("--rate", default=0.2, show_default=True, help="Of arrivals, a second.")
@click.option("--context", default=2048, show_default=True, help="Tokens that an arriving agent asks.")
@click.option("--time-scale", default=1.0, show_default=True, help="Of tools' times, and of times between arrivals.")
@click.option("--ways", default=",".join(Way), show_default=True, help="Of telling the daemon.")
@click.option("--reference-memory", help="Budget of the daemon with room for all; by default there is none.")
@click.option("--peer", is_flag=True, help="Also transformers' continuous batching.")
@click.option("--peer-seconds", default=600.0, show_default=True, help="After which each of its runs is broken off.")
@click.option("--peer-host-gib", type=float, help="Its host memory for KV; by default as much as the daemon has.")
@click.option("--seed", default=0, show_default=True, help="Of the tools' times and the arrivals.")
@command.folder
def main(
    checkpoint: Path,
    device: str,
    memory: str,
    kv: str | None,
    host_kv: str | None,
    disk_kv: str | None,
    keep_host: bool,
    paging: float | None,
    crowds: Sequence[str],
    arrivals: int,
    rate: float,
    context: int,
    time_scale: float,
    ways: str,
    reference_memory: str | None,
    peer: bool,
    peer_seconds: float,
    peer_host_gib: float | None,
    folder: Path | None,
    **each: Any,
) -> Result:
    model, scheduling = given(kv=kv, host_kv=host_kv, disk_kv=disk_kv, keep_host=keep_host), given(paging=paging)
    setting = Setting(device, memory, model, folder, scheduling)
    works = works_of(crowds, arrivals, context, rate, time_scale, each)
    asked = Peer(peer_seconds, None if peer_host_gib is None else int(peer_host_gib * 2**30)) if peer else None
    found = measure(checkpoint, setting, works, ways_of(ways), reference_memory, asked)
    parameters: dict[str, Any] = {"model": checkpoint.name, "memory": memory, **model, **scheduling}
    parameters |= {"time_scale": time_scale, "reference_memory": reference_memory, "seed": each["seed"]}
    return Result(parameters, msgspec.to_builtins(found), summary(found), tables(checkpoint.name, found))


if __name__ == "__main__":
    main()
