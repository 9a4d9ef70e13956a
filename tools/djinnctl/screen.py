"""Where values become output: JSON or tables, once or again and again."""

from __future__ import annotations

import json
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


def show(
    read: Callable[[], T], render: Callable[[T], RenderableType], *, as_json: bool, every_s: float | None = None
) -> T:
    """Shows what `read` returns, and with `every_s` reads and shows it again until Ctrl-C. Returns the last value."""
    if every_s is None:
        value = read()
        _print_json(value, indent=2) if as_json else _print(render(value))
        return value
    return _watch_json(read, every_s) if as_json else _watch(read, render, every_s)


def _watch_json(read: Callable[[], T], every_s: float) -> T:
    """One line a reading."""
    value = read()
    try:
        while True:
            _print_json(value)
            time.sleep(every_s)
            value = read()
    except KeyboardInterrupt:
        return value


def _watch(read: Callable[[], T], render: Callable[[T], RenderableType], every_s: float) -> T:
    from rich.live import Live

    value = read()
    with Live(render(value), console=Console(), auto_refresh=False) as live:
        try:
            while True:
                time.sleep(every_s)
                value = read()
                live.update(render(value), refresh=True)
        except KeyboardInterrupt:
            return value


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
        Console().print(renderable, highlight=False)


def _print_json(value: object, indent: int | None = None) -> None:
    click.echo(json.dumps(plain(value), indent=indent))
