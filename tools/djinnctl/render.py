"""Typed values as tables of at most 80 columns, and as plain JSON values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any

import msgspec

from djinn_client import (
    AdapterInfo,
    BudgetReply,
    DeviceInfo,
    ModelInfo,
    ModelPlan,
    PauseReply,
    PrefixInfo,
    SessionInfo,
    StatusReply,
    TokenInfo,
)
from djinn_client.protocol import CLASSES, Reply
from djinn_client.protocol.fields.scheduling import Latency, Spread
from djinnctl.layout import Group, Renderable, Span, line, new_table
from djinnctl.units import count, duration, exact_size, interval, rate, size

LONG_SESSION = 32_768  # tokens: a plan says how much memory their pages take

STYLES = {
    "ready": "green",
    "running": "green",
    "ok": "green",
    "loading": "yellow",
    "starting": "yellow",
    "draining": "yellow",
    "queued": "yellow",
    "held": "yellow",
    "arriving": "yellow",
    "stopped": "magenta",
    "paused": "magenta",
    "asleep": "magenta",
    "warn": "yellow",
    "failed": "red",
    "set aside": "red",
    "lost": "red",
    "fail": "red",
}


def plain(value: Any) -> Any:
    """The value as JSON has it, with every field by its name. Fields that only the wire needs are left out. JSON has no
    infinities and no NaN: they are null."""
    if isinstance(value, msgspec.Struct):
        hidden = {"id"} if isinstance(value, Reply) else set()
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__ if name not in hidden}
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def status(reply: StatusReply) -> Renderable:
    parts = [*summary(reply), "", devices(reply.devices)]
    if reply.models:
        parts += ["", models(reply.models)]
    if any(info.pages for info in reply.models):
        parts += ["", pools(reply.models)]
    if any(spread.count for _, _, spread in _spreads(reply.latency)):
        parts += ["", latency(reply.latency)]
    if reply.notes:
        parts += ["", *(Span(note, "yellow") for note in reply.notes)]
    if reply.integrity:
        parts += ["", Span("inconsistent:", "bold red"), *(Span(f"  {finding}") for finding in reply.integrity)]
    return Group(*parts)


def summary(reply: StatusReply) -> Iterator[Renderable]:
    running = ", ".join(f"{reply.sessions[name]} {name}" for name in CLASSES if reply.sessions.get(name)) or "none"
    yield line(
        Span(f"djinnd {reply.version}", "bold"),
        "  ",
        state(reply.state),
        f"  pid {reply.pid}  up {duration(reply.uptime_s)}  {reply.address}",
    )
    yield f"requests: {reply.requests_running} running, {reply.requests_queued} queued   sessions: {running}"
    yield f"connections: {reply.connections}   arena: {size(reply.arena_bytes)}"
    if reply.guessed_tokens:
        yield f"guessed tokens: {count(reply.guessed_tokens)}, {count(reply.kept_tokens)} of them right"


def devices(infos: Sequence[DeviceInfo]) -> Renderable:
    table = new_table("DEVICE", "STATE", "MEMORY", "STEPS>", "TOKENS>", "RESTARTS>", "")
    for info in infos:
        table.add_row(
            info.name,
            state(info.state),
            f"{size(info.used_bytes)} of {size(info.budget_bytes)}",
            count(info.steps),
            count(info.generated_tokens),
            str(info.restarts),
            Span(info.description, "dim"),
        )
    return table


def models(infos: Sequence[ModelInfo]) -> Renderable:
    if not infos:
        return Span("no models: `djinnctl pull ORG/NAME` fetches one, `djinnctl load FOLDER` loads one", "dim")
    table = new_table("MODEL", "STATE", "DTYPE", "PARAMETERS>", "CONTEXT>", "WEIGHTS>", "KV>", "PAGES>", "SESSIONS>")
    for info in infos:
        table.add_row(
            info.name,
            state(info.state),
            weights_of(info) or "-",
            count(info.parameters) if info.parameters else "-",
            str(info.max_context or "-"),
            size(info.weight_bytes) if info.weight_bytes else "-",
            size(info.kv_bytes) if info.kv_bytes else "-",
            f"{info.pages_used}/{info.pages}" if info.pages else "-",
            str(info.sessions),
        )
    return Group(table, *(line for info in infos for line in _beside(info)))


def pools(infos: Sequence[ModelInfo]) -> Renderable:
    """The used and all pages of each tier, for the models that have pages."""
    table = new_table("PAGES OF", "DEVICE>", "HOST>", "DISK>", "EACH>")
    for info in infos:
        if info.pages:
            table.add_row(
                info.name,
                f"{info.pages_used}/{info.pages}",
                f"{info.host_pages_used}/{info.host_pages}" if info.host_pages else "-",
                f"{info.disk_pages_used}/{info.disk_pages}" if info.disk_pages else "-",
                size(info.page_bytes),
            )
    return table


def latency(classes: Mapping[str, Latency]) -> Renderable:
    """The latencies of each class since the daemon began."""
    table = new_table("LATENCY", "CLASS", "COUNT>", "MEAN>", "P50>", "P90>", "P99>", "WORST>")
    for kind, name, spread in _spreads(classes):
        if spread.count:
            times = (spread.mean, spread.p50, spread.p90, spread.p99, spread.worst)
            table.add_row(kind, name, count(spread.count), *map(interval, times))
    return table


def _spreads(classes: Mapping[str, Latency]) -> Iterator[tuple[str, str, Spread]]:
    for kind in Latency.__struct_fields__:
        for name, of_class in classes.items():
            yield kind.replace("_", " "), name, getattr(of_class, kind)


def _beside(info: ModelInfo) -> Iterator[Span]:
    """Lines about a model that do not fit into its row."""
    if info.error:
        yield Span(f"{info.name}: {info.error}", "red")
    if info.adapters:
        yield Span(f"{info.name}: adapters {', '.join(info.adapters)}", "dim")
    if info.state == "ready":
        lines = [places(info), *info.notes]
        yield from (Span(f"{info.name}: {line}", "dim") for line in lines if line)


def sessions(infos: Sequence[SessionInfo]) -> Renderable:
    if not infos:
        return Span("no sessions", "dim")
    columns = ("SESSION", "USER", "MODEL", "CLASS", "STATE", "TOKENS>", "DEVICE>", "HOST>", "DISK>", "BYTES>", "IDLE>")
    table = new_table(*columns)
    table.columns[0] = table.columns[0]._replace(yields=0)  # it is what other commands want: never cut
    for number in (1, 2, 3):
        table.columns[number] = table.columns[number]._replace(yields=2)
    for info in infos:
        table.add_row(
            info.id,
            info.user_name,
            info.model,
            info.priority,
            state(info.state),
            str(info.tokens),
            *(str(pages or "-") for pages in (info.pages, info.host_pages, info.disk_pages)),
            size(held_bytes(info)),
            duration(info.idle_s),
        )
    return table


def held_bytes(info: SessionInfo) -> int:
    """Bytes of the session's pages in all tiers. A page that sessions share counts for each of them."""
    return (info.pages + info.host_pages + info.disk_pages) * info.page_bytes


def loaded(info: ModelInfo) -> str:
    """A line about a model that has just been loaded, and one for each of its notes."""
    where = places(info)
    line = (
        f"{info.name} is {info.state}: {info.family}, {count(info.parameters)} parameters in {info.blocks} blocks"
        f"{f' ({where})' if where else ''}, {weights_of(info)}; weights {size(info.weight_bytes)}, "
        f"KV {size(info.kv_bytes)} in {info.pages} pages"
    )
    return "\n".join((line, *(f"note: {note}" for note in info.notes)))


def places(of: ModelInfo | ModelPlan) -> str:
    """Where the blocks are: `29 plain, 0 packed, 11 streamed: 6.5 GiB a step`; empty for a model that is not loaded."""
    if not of.blocks_plain + of.blocks_packed + of.blocks_streamed:
        return ""
    streamed = f": {size(of.streamed_bytes)} a step" if of.streamed_bytes else ""
    return f"{of.blocks_plain} plain, {of.blocks_packed} packed, {of.blocks_streamed} streamed{streamed}"


def weights_of(model: ModelInfo | ModelPlan) -> str:
    """The dtype in which a model computes, and the codes of its weights: `bfloat16 (Q4_K, Q6_K)`, or `bfloat16
    (quantised to fp8, KV in fp8)`."""
    codes = f"quantised to {', '.join(model.codes)}" if model.quantised else ", ".join(model.codes)
    told = ", ".join(each for each in (codes, f"KV in {model.kv_dtype}" if model.kv_dtype else "") if each)
    return f"{model.dtype} ({told})" if told else model.dtype


def plan(plan: ModelPlan) -> Renderable:
    bus, memory = rate(plan.bus_bytes_per_s, "B"), rate(plan.memory_bytes_per_s, "B")
    reading, products = rate(plan.reading_bytes_per_s, "B"), rate(plan.flops_per_s, "FLOP")
    about = f"  {plan.family}, {weights_of(plan)}, {plan.blocks} blocks, {size(plan.weight_bytes)}"
    return Group(
        line(Span(plan.model, "bold"), about),
        f"blocks: {places(plan)}",
        "",
        _plan_memory(plan),
        "",
        f"first token of {plan.first_token_tokens} tokens: {interval(plan.first_token_s)}",
        *(_step(sessions, seconds) for sessions, seconds in sorted(plan.step_s.items())),
        f"measured on this device: bus {bus}, memory {memory}, products {products},",
        f"  weights for one row {reading}, a kernel's launch {interval(plan.launch_s)}",
        *(Span(f"note: {note}", "yellow") for note in plan.notes),
    )


def _step(sessions: int, seconds: float) -> str:
    tokens = sessions / seconds
    rate_of_tokens = f"{tokens:{',.0f' if tokens >= 100 else '.3g'}} tokens/s"
    return f"step of {sessions} session{'s' if sessions > 1 else ''}: {interval(seconds)}, {rate_of_tokens}"


def _plan_memory(plan: ModelPlan) -> Renderable:
    pages = -(-LONG_SESSION // plan.page_tokens) if plan.page_tokens else 0  # 0: from an older daemon
    of_session = f"{size(pages * plan.page_bytes)} for a session of {LONG_SESSION:,} tokens" if pages else ""
    parts = (
        ("resident blocks", plan.resident_bytes, f"{plan.blocks_plain} plain, {plan.blocks_packed} packed"),
        ("ring", plan.ring_bytes, f"{plan.slots} slots"),
        ("scratch", plan.scratch_bytes, "where packed blocks are decoded"),
        ("other weights", plan.rest_bytes, "embedding, norms, head"),
        ("KV pages", plan.kv_bytes, of_session),
        ("workspace", plan.workspace_bytes, ""),
        ("adapters", plan.adapter_bytes, "set aside for them"),
        ("device", plan.reserved_bytes, "its context and libraries"),
        ("other models", plan.others_bytes, "loaded now"),
    )
    table = new_table("MEMORY", "BYTES>", "")
    for name, nbytes, what in parts:
        if nbytes:
            table.add_row(name, size(nbytes), Span(what, "dim"))
    table.add_row("in all", size(sum(nbytes for _, nbytes, _ in parts)), f"of {size(plan.budget_bytes)}")
    table.add_row("host", size(plan.host_bytes), Span("shared memory", "dim"))
    return table


def budget(reply: BudgetReply) -> Renderable:
    """A change that has been made, and where blocks are now."""
    head = f"budget {size(reply.budget_bytes)}, {size(reply.used_bytes)} in use; changed in {interval(reply.seconds)}"
    return Group(head, *(line for info in reply.models for line in _beside(info)))


def freed(reply: BudgetReply, before: int) -> Renderable:
    """`before`: the budget before the change."""
    given_back = f"djinnctl budget {exact_size(before)}"
    return Group(budget(reply), f"{size(before - reply.budget_bytes)} are yours until `{given_back}`")


def paused(session: str, reply: PauseReply) -> str:
    place = "disk" if reply.tier == "disk" else "the host"
    return f"{session} is paused: {pages(reply)}, went to {place} in {interval(reply.seconds)}"


def pages(reply: PauseReply) -> str:
    """The pages that a pause has moved: `1 page, 5.6 MiB`."""
    return f"{reply.pages} page{'' if reply.pages == 1 else 's'}, {size(reply.nbytes)}"


def published(info: PrefixInfo) -> str:
    return f"{info.id}: {info.tokens} tokens of {info.model} are public"


def prefixes(infos: Sequence[PrefixInfo]) -> Renderable:
    if not infos:
        return Span("no public prefixes", "dim")
    table = new_table("PREFIX", "MODEL", "TOKENS>", "MARKED BY", "MARKED")
    table.columns[0] = table.columns[0]._replace(yields=0)
    for info in infos:
        table.add_row(info.id, info.model, str(info.tokens), info.user_name, _date(info.created))
    return table


def adapters(infos: Sequence[AdapterInfo]) -> Renderable:
    if not infos:
        return Span("no adapters: `djinnctl adapters load MODEL FOLDER` loads one", "dim")
    table = new_table("ADAPTER", "MODEL", "STATE", "RANK>", "MODULES>", "BYTES>", "SESSIONS>")
    for info in infos:
        figures = (str(info.rank), str(info.modules), size(info.nbytes)) if info.identity else ("-", "-", "-")
        stands = "loaded" if info.is_loaded else "available"
        table.add_row(info.name, info.model, stands, *figures, str(info.sessions))
    return table


def adapter_loaded(info: AdapterInfo) -> str:
    what = f"rank {info.rank}, {info.modules} modules, {size(info.nbytes)}"
    return f"{info.model}:{info.name} is loaded: {what}"


def withdrawn(prefix: str, in_force: bool) -> str:
    how_long = "; its pages stay shared until the model is loaded the next time" if in_force else ""
    return f"{prefix} is withdrawn{how_long}"


def tokens(infos: Sequence[TokenInfo]) -> Renderable:
    if not infos:
        return Span("no tokens", "dim")
    table = new_table("TOKEN", "USER", "UP TO CLASS", "ADDED", "EXPIRES", "LAST USED")
    for info in sorted(infos, key=lambda info: info.name):
        times = map(_date, (info.created, info.expires, info.used))
        table.add_row(info.name, info.user_name, info.highest_class or "any", *times)
    return table


def state(name: str) -> Span:
    return Span(name, STYLES.get(name, ""))


def _date(at: float | None) -> str:
    return "never" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")
