"""Quotas, and what is used of them, as a table: a few lines a user."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from djinn_client import QuotaUse
from djinnctl.layout import Renderable, new_table
from djinnctl.units import size


def table(uses: Sequence[QuotaUse]) -> Renderable:
    shown = new_table("USER", "RULE", "UP TO CLASS", "WEIGHT>", "OF", "USED>", "LIMIT>")
    for use in uses:
        who = [use.user_name, use.rule or "-", use.highest_class, f"{use.weight:g}"]
        for line in _lines(use):
            shown.add_row(*who, *line)
            who = [""] * len(who)
    return shown


def _lines(use: QuotaUse) -> Iterator[tuple[str, str, str]]:
    """The sessions, and every resource that has a limit or is in use."""
    limit = use.sessions_limit
    yield "sessions", str(use.sessions), "none" if limit is None else str(limit)
    for name, held, most in (
        ("device_kv", use.device_kv, use.device_kv_limit),
        ("host_kv", use.host_kv, use.host_kv_limit),
        ("disk_kv", use.disk_kv, use.disk_kv_limit),
    ):
        if held or most is not None:
            yield name, size(held), "none" if most is None else size(most)
    rate, most_rate = use.tokens_per_s, use.tokens_per_s_limit
    if rate >= 0.05 or most_rate is not None:
        yield "tokens_per_s", f"{rate:.1f}", "none" if most_rate is None else f"{most_rate:g}"
    for resource in use.resources:
        if resource.used:
            write = size if resource.name.endswith("_bytes") else str
            yield resource.name, write(resource.used), write(resource.limit)
