"""Typed values as tables of at most 80 columns, and as plain JSON values."""

from __future__ import annotations

import pwd
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from djinn_client import DeviceInfo, ModelInfo, SessionInfo, StatusReply
from djinn_client.protocol import CLASSES, Reply
from djinnctl.units import count, duration, size

STYLES = {
    "ready": "green",
    "running": "green",
    "ok": "green",
    "loading": "yellow",
    "starting": "yellow",
    "draining": "yellow",
    "queued": "yellow",
    "held": "yellow",
    "warn": "yellow",
    "failed": "red",
    "lost": "red",
    "fail": "red",
}


def plain(value: Any) -> Any:
    """What a value holds, every field by its name, for JSON; the wire's own fields are left out."""
    if isinstance(value, msgspec.Struct):
        hidden = {"id"} if isinstance(value, Reply) else set()
        return {name: plain(getattr(value, name)) for name in value.__struct_fields__ if name not in hidden}
    if isinstance(value, list):
        return [plain(item) for item in value]
    return value


def status(reply: StatusReply) -> RenderableType:
    return Group(*_status(reply))


def _status(reply: StatusReply) -> Iterator[RenderableType]:
    running = ", ".join(f"{reply.sessions[name]} {name}" for name in CLASSES if reply.sessions.get(name)) or "none"
    yield Text.assemble(
        (f"djinnd {reply.version}", "bold"),
        "  ",
        state(reply.state),
        f"  pid {reply.pid}  up {duration(reply.uptime_s)}  {reply.address}",
    )
    yield f"requests: {reply.requests_running} running, {reply.requests_queued} queued   sessions: {running}"
    yield f"connections: {reply.connections}   arena: {size(reply.arena_bytes)}"
    yield ""
    yield devices(reply.devices)
    if reply.models:
        yield ""
        yield models(reply.models)
    if reply.integrity:
        yield ""
        yield Text("inconsistent:", "bold red")
        yield from (Text(f"  {finding}") for finding in reply.integrity)


def devices(infos: Sequence[DeviceInfo]) -> RenderableType:
    table = _table("DEVICE", "STATE", "MEMORY", "STEPS>", "TOKENS>", "RESTARTS>", "")
    for info in infos:
        table.add_row(
            info.name,
            state(info.state),
            f"{size(info.used_bytes)} of {size(info.budget_bytes)}",
            count(info.steps),
            count(info.generated_tokens),
            str(info.restarts),
            Text(info.description, "dim"),
        )
    return table


def models(infos: Sequence[ModelInfo]) -> RenderableType:
    if not infos:
        return Text("no models: put a checkpoint's folder where djinnd looks, or `djinnctl load PATH`", "dim")
    table = _table("MODEL", "STATE", "DTYPE", "PARAMETERS>", "CONTEXT>", "WEIGHTS>", "KV>", "PAGES>", "SESSIONS>")
    for info in infos:
        table.add_row(
            info.name,
            state(info.state),
            info.dtype or "-",
            count(info.parameters) if info.parameters else "-",
            str(info.max_context or "-"),
            size(info.weight_bytes) if info.weight_bytes else "-",
            size(info.kv_bytes) if info.kv_bytes else "-",
            f"{info.pages_used}/{info.pages}" if info.pages else "-",
            str(info.sessions),
        )
    errors = [Text(f"{info.name}: {info.error}", "red") for info in infos if info.error]
    return Group(table, *errors)


def sessions(infos: Sequence[SessionInfo]) -> RenderableType:
    if not infos:
        return Text("no sessions", "dim")
    table = _table("SESSION", "USER", "MODEL", "CLASS", "STATE", "TOKENS>", "KV>", "PAGES>", "AGE>", "IDLE>")
    table.columns[0].min_width = max(len(info.id) for info in infos)  # it is what `close` wants: never cut
    for info in infos:
        table.add_row(
            info.id,
            user_name(info.user),
            info.model,
            info.priority,
            state(info.state),
            str(info.tokens),
            str(info.kv_tokens),
            str(info.pages),
            duration(info.age_s),
            duration(info.idle_s),
        )
    return table


def loaded(info: ModelInfo) -> str:
    """One line about a model that has just been loaded."""
    return (
        f"{info.name} is {info.state}: {info.family}, {count(info.parameters)} parameters in {info.blocks} blocks, "
        f"{info.dtype}; weights {size(info.weight_bytes)}, KV {size(info.kv_bytes)} in {info.pages} pages"
    )


def state(name: str) -> Text:
    return Text(name, STYLES.get(name, ""))


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _table(*headings: str) -> Table:
    """A heading that ends in `>` has its numbers to the right."""
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for heading in headings:
        number = heading.endswith(">")
        table.add_column(heading.rstrip(">"), justify="right" if number else "left", no_wrap=True, overflow="ellipsis")
    return table
