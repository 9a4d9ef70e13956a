"""Daemons that serve agents: one with too little device memory, measured in every way, and one with room for all."""

from __future__ import annotations

import asyncio
import gc
import resource
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import NamedTuple

import click
import msgspec

import djinn_client as djinn
from djinn_client.protocol import Tier
from tools.bench.agents.figures import Figures, figures
from tools.bench.agents.loop import Run
from tools.bench.agents.plan import Work
from tools.bench.agents.results import Results, Tried
from tools.bench.agents.sessions import Sessions, Way
from tools.bench.harness.bus import Rates
from tools.bench.harness.command import say
from tools.bench.harness.paged_model import MODEL, PagedModel, daemon_of, loaded
from tools.bench.harness.usage import PERIOD_S, Usage

TIERS: tuple[Tier, ...] = ("host", "disk")
DESCRIPTORS = 64  # files that this process has open beside a connection for each agent
SPARE_BYTES = 64 << 20  # device memory for the plan's rounding
ALONE = 6  # answers of the agent that is measured alone
WARM = 16  # agents that warm up, without being measured


class Setting(NamedTuple):
    """Configuration of a daemon."""

    device: str
    memory: str
    model: dict[str, str | bool]  # kv, host_kv, disk_kv, keep_host
    folder: Path | None
    scheduling: dict[str, float]  # paging


def own_daemon(checkpoint: Path, of: Setting) -> AbstractContextManager[str]:
    return daemon_of(checkpoint, of.device, of.memory, of.model, of.folder, scheduling=of.scheduling)


def with_tiers(checkpoint: Path, setting: Setting, bus: Rates, works: Sequence[Work], ways: Sequence[Way]) -> Results:
    with own_daemon(checkpoint, setting) as address:
        tiers = [tier for tier in TIERS if setting.model.get(f"{tier}_kv") != "0"]
        kv_bytes = 0 if "kv" in setting.model else room_for_pages(address)
        with loaded(address, max(work.context for work in works), kv_bytes, tiers) as model:
            for work in works:
                expect_room(work, model.info)
            tried = [try_all(model, work, ways) for work in works]
            status, info = djinn.status(check=True, address=address), model.now()
    return Results(
        device=status.devices[0].description,
        budget_bytes=status.devices[0].budget_bytes,
        ceilings={"up": bus.up, "down": bus.down, "both": bus.both},
        page_size=info.page_size,
        page_bytes=info.page_bytes,
        pages={"device": info.pages, "host": info.host_pages, "disk": info.disk_pages},
        dtype=info.dtype,
        tried=tried,
        findings=status.integrity,
    )


def with_room(checkpoint: Path, setting: Setting, found: Results) -> None:
    """Runs the crowds again with as many agents as fit. No session has to leave the device, and none sends signals."""
    with own_daemon(checkpoint, setting) as address:
        room = room_for_pages(address)
        for tried in found.tried:
            if tried.work.rate:
                continue
            each = found.session_bytes(tried.work)
            work = msgspec.structs.replace(tried.work, agents=min(tried.work.agents, room // each - 1))
            if work.agents < 1:
                raise click.ClickException(f"{setting.memory} of reference memory has no room for {tried.name}")
            with loaded(address, work.context, (work.agents + 1) * each) as model:
                run(model, warm_up(work), Way.NONE)
                time.sleep(model.quiet_s)
                say(f"{work.agents} of {tried.name}: with room for all")
                tried.reference = run(model, work, Way.NONE)


def room_for_pages(address: str) -> int:
    """Bytes that the weights leave of the device's budget, if all weights are plain; 0 if they do not fit."""
    plan = djinn.plan(MODEL, kv_bytes=1, address=address)
    if plan.blocks_plain < plan.blocks:
        return 0
    taken = plan.resident_bytes + plan.rest_bytes + plan.ring_bytes + plan.scratch_bytes + plan.workspace_bytes
    loading = plan.packed_block_bytes  # a packed block becomes plain on the device
    return max(0, plan.budget_bytes - taken - loading - plan.reserved_bytes - SPARE_BYTES)


def expect_room(work: Work, info: djinn.ModelInfo) -> None:
    """Raises ClickException for work that is too large for the model, or for this process."""
    if work.session_tokens > info.max_context:
        told = f"an agent comes to {work.session_tokens:,} tokens, the model takes {info.max_context:,}"
        raise click.ClickException(f"{told}: fewer --loops, or a smaller --crowd")
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if work.agents + DESCRIPTORS > limit:
        raise click.ClickException(f"{work.agents} agents need a connection each; this process may open {limit} files")


def try_all(model: PagedModel, work: Work, ways: Sequence[Way]) -> Tried:
    run(model, warm_up(work), Way.NONE)
    gc.collect()
    gc.freeze()  # a collection would stop all agents of this process at once, for a tenth of a second
    time.sleep(model.quiet_s)
    say(f"one agent alone, {work.context:,} tokens")
    tried = Tried(work=work, alone=run(model, alone(work), Way.NONE))
    for way in ways:
        say(f"{tried.name}: {way}")
        period = min(PERIOD_S, work.tool_s[0] / 4)  # two samples or more in each wait
        with Usage(model.address, model.info, period) as usage:
            tried.ways[way] = run(model, work, way, usage)
        tried.usage[way] = usage.points
    return tried


def run(model: PagedModel, work: Work, way: Way, usage: Usage | None = None) -> Figures:
    lives = Run(work, Sessions(model.address, way), model.prompt, usage.count if usage else None)
    return figures(work, asyncio.run(lives()))


def alone(work: Work) -> Work:
    return msgspec.structs.replace(work, agents=1, loops=ALONE, tool_s=(0.01, 0.02), rate=0.0)


def warm_up(work: Work) -> Work:
    """Work that runs steps of many sizes, so that the first way that is measured has no disadvantage."""
    return msgspec.structs.replace(work, agents=min(WARM, work.agents), loops=2, tool_s=(0.0, 0.2), rate=0.0)
