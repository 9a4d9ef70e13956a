"""More sessions alive at once than their KV fits the device, beside the same work with room for all of them.

    python -m tools.bench.paging.oversubscribe CHECKPOINT [--sessions 50] [--context 2048] [--new 50] [--memory 80GiB]

It counts the sessions that are served and the tokens that differ, and takes the time. Every session gets its prompt.
Then all sessions are called again, in the same order, for each turn, as agents do. This is done twice, with other
prompts:

one after another   Every step has one row, in both daemons, so each token must be the same. Sessions with recomputed
                    KV are an exception: a step of many rows rounds differently in the last bits. The order is the
                    worst possible: the session that is called next has been away for longest.
all at once         The daemon chooses the batches, and only the time counts. The last bits of a row depend on the
                    shape of its batch, and so may some tokens.

Where the device has no room for all sessions, the second daemon serves one group after another, each as large as
possible and to its end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Table

import djinn_client as djinn
from djinn_client.protocol import Tier
from tools.bench.harness import command
from tools.bench.harness.command import Result, given, say
from tools.bench.harness.paged_model import MODEL, PagedModel, daemon_of, loaded
from tools.bench.harness.usage import Usage
from tools.bench.paging.crowd import Answers, Work, ask

GIB = 1 << 30
SHORT = 16  # tokens of sessions that warm up
TIERS: tuple[Tier, ...] = ("host", "disk")
ALONE, ALL = "one after another", "all at once"


class Setting(NamedTuple):
    """Configuration of one of the two daemons."""

    device: str
    memory: str
    model: dict[str, str]  # kv, host_kv, disk_kv


class Demand(NamedTuple):
    """Memory that the sessions would take if all of it was on the device."""

    session_bytes: int  # a session's KV at its end
    kv_bytes: int
    weight_bytes: int


def measure(checkpoint: Path, short: Setting, roomy: Setting, folder: Path | None, work: Work) -> dict[str, Any]:
    modes = {ALONE: 1} | ({} if work.sequential else {ALL: work.sessions})
    found: dict[str, Any] = {}
    tokens: dict[str, list[Answers]] = {mode: [] for mode in modes}
    with daemon_of(checkpoint, short.device, short.memory, short.model, folder) as address:
        tiers: list[Tier] = [tier for tier in TIERS if short.model.get(f"{tier}_kv") != "0"]
        with loaded(address, work.context, tiers=tiers) as model:
            demand = demanded(model.info, work)
            found |= {"demand": demand._asdict(), "model": figures(model), "usage": {}}
            warm_up(model, work, modes)
            for number, (mode, at_once) in enumerate(modes.items()):
                say(f"{work.sessions} sessions, {mode}, {model.info.kv_bytes / GIB:.1f} GiB for their KV")
                with Usage(address, model.info) as usage:
                    answers = asyncio.run(ask(model, work, at_once, number, usage.count))
                tokens[mode].append(answers)
                found["usage"][mode] = usage.points
                say(f"{answers.served} of {work.sessions} served in {answers.seconds:.1f} s; {used(mode, found)}")
            found["findings"] = djinn.status(check=True, address=address).integrity
            device = djinn.status(address=address).devices[0]
            found |= {"device": device.description, "budget": device.budget_bytes}
            kv_bytes = model.info.kv_bytes
    with daemon_of(checkpoint, roomy.device, roomy.memory, roomy.model, folder) as address:
        wanted = demand.kv_bytes + model.info.page_bytes
        try:
            djinn.load(MODEL, kv_bytes=wanted, host_kv_bytes=0, disk_kv_bytes=0, address=address)
        except djinn.OutOfMemory as error:
            say(f"no room for all at once: {error.message}")
            wanted = kv_bytes
        with loaded(address, work.context, wanted) as model:
            fit = model.info.pages * model.info.page_bytes // demand.session_bytes
            groups = math.ceil(work.sessions / fit)
            warm_up(model, work, modes)
            for number, (mode, at_once) in enumerate(modes.items()):
                say(f"{work.sessions} sessions, {mode}, with room for all" + f", in {groups} groups" * (groups > 1))
                tokens[mode].append(asyncio.run(ask(model, work, at_once, number, groups=groups)))
    found["groups"] = groups
    found["modes"] = {mode: compared(*both) for mode, both in tokens.items()}
    return found


def warm_up(model: PagedModel, work: Work, modes: Mapping[str, int]) -> None:
    """Runs steps of as many rows as the measured ones, so that no daemon compiles or captures later. Their prompts are
    different."""
    for kind, at_once in enumerate(modes.values(), work.sessions * len(modes)):
        short = work._replace(sessions=at_once, context=SHORT, new=SHORT, turns=1, ahead=0)
        asyncio.run(ask(model, short, at_once, kind))
    time.sleep(model.quiet_s)


def demanded(info: djinn.ModelInfo, work: Work) -> Demand:
    pages = -(-work.session_tokens // info.page_size)
    return Demand(pages * info.page_bytes, work.sessions * pages * info.page_bytes, info.weight_bytes)


def figures(model: PagedModel) -> dict[str, int]:
    names = ("page_size", "page_bytes", "pages", "host_pages", "disk_pages", "kv_bytes", "weight_bytes")
    return {name: getattr(model.now(), name) for name in names}


def compared(short: Answers, roomy: Answers) -> dict[str, Any]:
    """Compares the sessions that both daemons served: equal tokens, and different tokens though all KV was kept."""
    pairs = enumerate(zip(short.tokens, roomy.tokens, strict=True))
    both = {member: a == b for member, (a, b) in pairs if a is not None and b is not None}
    anew = short.computed_anew | roomy.computed_anew
    return {
        "served": short.served,
        "sessions": len(short.tokens),
        "failures": short.failures,
        "failures_with_room": roomy.failures,
        "same_tokens": sum(both.values()),
        "unlike_though_kept": sum(not same for member, same in both.items() if member not in anew),
        "seconds": short.seconds,
        "seconds_with_room": roomy.seconds,
        "ratio": short.seconds / roomy.seconds,
        "computed_anew": len(short.computed_anew),
    }


# --- what is said of it -----------------------------------------------------------------------------------------------


def peaks(points: Sequence[dict[str, float]]) -> dict[str, float]:
    return {name: max(point[name] for point in points) for name in points[0]}


def table(name: str, found: dict[str, Any]) -> Table:
    demand = found["demand"]
    logical = (demand["kv_bytes"] + demand["weight_bytes"]) / 1e9
    shown = Table(
        "asked", "served", "the same tokens", "seconds", "with room", "ratio", "computed anew", "unlike though kept"
    )
    shown.title = f"{name}: {logical:.1f} GB of demand on {found['device']}"
    shown.caption = "; ".join(used(mode, found) for mode in found["modes"])
    for mode, one in found["modes"].items():
        served = f"{one['served']} of {one['sessions']}"
        times = (f"{one['seconds']:.2f}", f"{one['seconds_with_room']:.2f}", f"{one['ratio']:.2f}")
        shown.add_row(
            mode, served, str(one["same_tokens"]), *times, str(one["computed_anew"]), str(one["unlike_though_kept"])
        )
    return shown


def used(mode: str, found: dict[str, Any]) -> str:
    most = peaks(found["usage"][mode])
    told = (f"{kind} {most[kind] / 1e9:.2f}" for kind in ("device", "host", "disk", "resident"))
    return f"{mode}, at most, GB: {', '.join(told)}"


def summary(found: dict[str, Any]) -> str:
    demand = found["demand"]
    parts = [f"{(demand['kv_bytes'] + demand['weight_bytes']) / 1e9:.1f} GB of demand"]
    for mode, one in found["modes"].items():
        parts.append(
            f"{mode}: {one['served']} of {one['sessions']} served, {one['same_tokens']} with the same tokens as with "
            f"room for all ({one['unlike_though_kept']} unlike though kept), {one['seconds']:.1f} s "
            f"({one['ratio']:.2f} of that with room); {used(mode, found)}"
        )
    return "; ".join(parts)


@command.bench("oversubscribe", __doc__)
@command.checkpoint
@command.device
@command.memory
@command.kv
@command.host_kv
@command.disk_kv
@click.option("--room", default="0", show_default=True, help="Budget of the daemon with room for all sessions.")
@click.option("--sessions", default=50, show_default=True)
@click.option("--context", default=2048, show_default=True, help="Tokens of each prompt.")
@click.option("--new", default=50, show_default=True, help="Tokens that a session generates in a turn.")
@click.option("--turns", default=2, show_default=True, help="Turns after the prompt.")
@click.option(
    "--ahead",
    default=0,
    show_default=True,
    help="A session sends COMPUTE so many sessions before its turn; 0: not at all.",
)
@click.option("--sequential", is_flag=True, help="Measure one after another only.")
@command.folder
def main(
    checkpoint: Path,
    device: str,
    memory: str,
    kv: str | None,
    host_kv: str | None,
    disk_kv: str | None,
    room: str,
    folder: Path | None,
    **work: Any,
) -> Result:
    short = Setting(device, memory, given(kv=kv, host_kv=host_kv, disk_kv=disk_kv))
    found = measure(checkpoint, short, Setting(device, room, {}), folder, Work(**work))
    parameters = {"model": checkpoint.name, "memory": memory, **short.model, "room": room, **work}
    return Result(parameters, found, summary(found), [table(checkpoint.name, found)])


if __name__ == "__main__":
    main()
