"""Results of fairness.py, and their presentation."""

from __future__ import annotations

import msgspec
from rich.table import Table

from tools.bench.loads.course import Outcome


class Finding(msgspec.Struct, kw_only=True):
    """A figure with its bar; `met` tells whether the figure meets the bar."""

    name: str
    figure: float
    bar: str
    met: bool
    note: str = ""


class Found(msgspec.Struct, kw_only=True):
    findings: list[Finding] = []
    outcomes: dict[str, Outcome] = {}


def table(title: str, found: Found) -> Table:
    shown = Table("figure", title=title)
    for column in ("found", "bar"):
        shown.add_column(column, justify="right")
    shown.add_column("", justify="left")
    for one in found.findings:
        shown.add_row(one.name, f"{one.figure:.3f}", one.bar, f"{'' if one.met else 'missed: '}{one.note}")
    return shown


def summary(found: Found) -> str:
    return "; ".join(
        f"{one.name} {one.figure:.3f} (bar {one.bar}{'' if one.met else ', missed'}; {one.note})"
        for one in found.findings
    )
