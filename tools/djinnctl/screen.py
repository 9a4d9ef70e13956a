"""Where values become output: JSON or tables, once or again and again."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import click
from rich.console import Console, RenderableType

from djinn_client import Progress
from djinn_client.connection import OnProgress
from djinnctl.render import plain

T = TypeVar("T")

UNCUT = 10_000  # columns, where nobody looks at a screen: `grep` finds what is not cut


def show(
    read: Callable[[], T], render: Callable[[T], RenderableType], *, as_json: bool, every_s: float | None = None
) -> T:
    """Shows what `read` returns, and with `every_s` reads and shows it again until Ctrl-C. Returns the last value.

    On a terminal each reading takes the place of the one before; elsewhere it follows that, in JSON as one line.
    """
    value = read()
    if every_s is None:
        _print_json(value, indent=2) if as_json else _print(render(value))
        return value
    if as_json:
        return _watch(value, read, _print_json, every_s)
    console = _console()
    if not _redraws(console):
        return _watch(value, read, lambda value: _print(render(value)), every_s)
    from rich.live import Live

    with Live(console=console, auto_refresh=False) as live:
        return _watch(value, read, lambda value: live.update(render(value), refresh=True), every_s)


def _watch(value: T, read: Callable[[], T], put: Callable[[T], None], every_s: float) -> T:
    try:
        while True:
            put(value)
            time.sleep(every_s)
            value = read()
    except KeyboardInterrupt:
        return value


def _redraws(console: Console) -> bool:
    """Whether it is a terminal that can go back to what it has shown. FORCE_COLOR makes none of a pipe."""
    return console.file.isatty() and console.is_terminal and not console.is_dumb_terminal


@contextmanager
def loading_bar(*, hidden: bool) -> Iterator[OnProgress | None]:
    """A bar on stderr that follows the daemon's Progress; it has no end where the daemon knows no total."""
    if hidden:
        yield None
        return
    from rich.progress import BarColumn, DownloadColumn, TaskID, TextColumn, TransferSpeedColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    bars = Bars(*columns, console=Console(stderr=True))
    stages: dict[str, TaskID] = {}

    def follow(told: Progress) -> None:
        bars.start()
        if told.stage not in stages:
            stages[told.stage] = bars.add_task(f"{told.model}: {told.stage}", total=None)
        bars.update(stages[told.stage], completed=told.done, total=told.total or None)

    try:
        yield follow
    finally:
        if stages:
            bars.stop()


def _print(renderable: RenderableType) -> None:
    if isinstance(renderable, str):
        click.echo(renderable)  # a sentence for people or scripts, which is not to be wrapped
    else:
        _console().print(renderable, highlight=False)


def _console() -> Console:
    """As wide as the terminal, or as COLUMNS says; else as wide as it takes."""
    console = Console()
    if not console.file.isatty() and not os.environ.get("COLUMNS"):
        console.width = UNCUT
    return console


def _print_json(value: object, indent: int | None = None) -> None:
    click.echo(json.dumps(plain(value), indent=indent, allow_nan=False))
