"""Tokens as a line and as a table."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from djinn_client import TokenAdded, TokenInfo
from djinnctl.layout import Renderable, Span, new_table


def added(reply: TokenAdded) -> str:
    """The token alone, so that a script can take it."""
    return reply.token


def table(infos: Sequence[TokenInfo]) -> Renderable:
    if not infos:
        return Span("no tokens", "dim")
    shown = new_table("TOKEN", "USER", "UP TO CLASS", "ADDED", "EXPIRES", "LAST USED")
    for info in sorted(infos, key=lambda info: info.name):
        times = (_time(at) for at in (info.created, info.expires, info.used))
        shown.add_row(info.name, info.user_name, info.highest_class or "any", *times)
    return shown


def _time(at: float | None) -> str:
    return "never" if at is None else datetime.fromtimestamp(at).strftime("%Y-%m-%d %H:%M")
