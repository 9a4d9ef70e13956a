"""Agents that reason, wait for a tool, and go on: more of them than fit the device, with and without signals.

    python -m tools.bench.agents CHECKPOINT [--memory 80GiB] [--crowd 80x2048 --crowd 200x1024] [--loops 4]
                                 [--arrivals 80 --rate 0.2] [--reference-memory 130GiB] [--peer]

A crowd is alive all the time: each agent has a context, and loops through a tool, its observation and an answer.
Arrivals are a Poisson process: each agent asks, uses a tool once, reflects, and leaves. Before each crowd, some agents
make the daemon compile and capture the steps, and one agent alone shows how long an undisturbed step takes. Then every
way of telling the daemon (sessions.py) is measured in one daemon, with the same tool times and with other tokens.

The model is served without its tokenizer, so that a client gets each token at once and not when its text is certain. A
wake-up lasts from the tool's end, before COMPUTE is sent, to the first token in the agents' process.

--reference-memory  the crowds again in a daemon with room for all agents, or for as many as fit
--peer              transformers' continuous batching, with as much device and host memory for KV (peers/batching.py);
                    --peer-host-gib sets its host memory, as torch rounds each of 2 x blocks tensors to a power of two
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
    """Limits of transformers' continuous batching."""

    run_s: float  # a run is stopped after this time, and its answers until then count
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
    for tried, run in zip(found.tried, found.peer.runs, strict=False):  # there are no runs where the peer has failed
        tried.peer = run


# --- the command ------------------------------------------------------------------------------------------------------


def crowd_of(text: str) -> tuple[int, int]:
    """Reads AGENTSxTOKENS: the number of agents, and the tokens of each agent's context. Raises BadParameter."""
    found = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", text)
    if not found:
        raise click.BadParameter(f"{text!r} is not AGENTSxTOKENS, as in 80x2048")
    return int(found[1]), int(found[2])


def ways_of(text: str) -> list[Way]:
    """Reads names of ways, separated by commas. Raises BadParameter."""
    try:
        return [Way(name) for name in text.split(",")]
    except ValueError as error:
        raise click.BadParameter(f"{error}: there are {', '.join(Way)}") from error


def works_of(
    crowds: Sequence[str], arrivals: int, context: int, rate: float, scale: float, each: dict[str, Any]
) -> list[Work]:
    """The crowds, and the arrivals as the last piece of work. `scale` stretches the tools' times and the times between
    arrivals."""
    tool_s = (each["tool_s"][0] * scale, each["tool_s"][1] * scale)
    lengths = {"observation": each["observation"], "answer": each["answer"], "tool_s": tool_s, "seed": each["seed"]}
    works = [
        Work(agents=agents, context=tokens, loops=each["loops"], **lengths) for agents, tokens in map(crowd_of, crowds)
    ]
    if arrivals:
        works.append(Work(agents=arrivals, context=context, loops=1, rate=rate / scale, **lengths))
    return works


def preset(context: click.Context, option: click.Parameter, chosen: bool) -> None:
    """Makes the small figures of --smoke the defaults of the other options."""
    if chosen:
        context.default_map = SMOKE


@command.bench("agents", __doc__, width=WIDTH)
@command.checkpoint
@click.option(
    "--smoke", is_flag=True, is_eager=True, expose_value=False, callback=preset, help="A small run for two cores."
)
@command.device
@click.option("--memory", default="80GiB", show_default=True, help="Budget of the daemon.")
@click.option("--kv", help="Device memory for KV pages; by default all that the weights leave.")
@command.host_kv
@command.disk_kv
@click.option("--keep-host/--no-keep-host", default=True, help="Keep the weights in host memory too.  [default: yes]")
@click.option("--paging", type=float, help="Value of scheduling.paging; by default the daemon's choice.")
@click.option("--crowd", "crowds", multiple=True, default=["80x2048", "200x1024"], show_default=True)
@click.option("--loops", default=4, show_default=True, help="Loops of each agent of a crowd.")
@click.option(
    "--tool-s",
    nargs=2,
    type=float,
    default=(10.0, 20.0),
    show_default=True,
    help="Shortest and longest time of a tool.",
)
@click.option("--observation", default=64, show_default=True, help="Tokens of a tool's result.")
@click.option("--answer", default=50, show_default=True, help="Tokens of an answer.")
@click.option("--arrivals", default=0, show_default=True, help="Number of arriving agents.")
@click.option("--rate", default=0.2, show_default=True, help="Arrivals a second.")
@click.option("--context", default=2048, show_default=True, help="Tokens of an arriving agent's question.")
@click.option(
    "--time-scale", default=1.0, show_default=True, help="Factor of the tools' times and of the times between arrivals."
)
@click.option("--ways", default=",".join(Way), show_default=True, help="Ways of telling the daemon.")
@click.option("--reference-memory", help="Budget of a daemon with room for all; by default it is not measured.")
@click.option("--peer", is_flag=True, help="Also measure transformers' continuous batching.")
@click.option("--peer-seconds", default=600.0, show_default=True, help="The longest time of each of the peer's runs.")
@click.option("--peer-host-gib", type=float, help="The peer's host memory for KV; by default the daemon's.")
@click.option("--seed", default=0, show_default=True, help="Seed of the tools' times and of the arrivals.")
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
