"""Where values become output: JSON or tables, once or again and again."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import click

from djinnctl.layout import ELLIPSIS, Renderable, lines_of, shown
from djinnctl.render import plain

T = TypeVar("T")

UNCUT = 10_000  # columns, if the output is no screen: `grep` finds text that is not cut
LONGEST_SLEEP_S = 0.25
HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def show(read: Callable[[], T], render: Callable[[T], Renderable], *, as_json: bool, every_s: float | None = None) -> T:
    """Shows what `read` returns, and with `every_s` reads and shows it again until Ctrl-C. Returns the last value.

    On a terminal each reading takes the place of the one before; elsewhere it follows that, in JSON as one line.
    """
    value = read()
    if every_s is None:
        _print_json(value, indent=2) if as_json else _print(render(value))
        return value
    if as_json:
        return _watch(value, read, _print_json, every_s)
    if not _redraws():
        return _watch(value, read, lambda value: _print(render(value)), every_s)
    picture = _Picture()
    try:
        return _watch(value, read, lambda value: picture.draw(render(value)), every_s)
    finally:
        picture.end()


def _watch(value: T, read: Callable[[], T], put: Callable[[T], None], every_s: float) -> T:
    try:
        while True:
            put(value)
            _wait(every_s)
            value = read()
    except KeyboardInterrupt:
        return value


def _wait(seconds: float) -> None:
    """Waits in pieces. Python sees a Ctrl-C that comes just before a sleep only after it."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(left, LONGEST_SLEEP_S))


class _Picture:
    """Lines at the end of the terminal's output that are drawn anew in their place."""

    def __init__(self) -> None:
        self._height = 0
        sys.stdout.write(HIDE_CURSOR)

    def draw(self, renderable: Renderable) -> None:
        width, height = shutil.get_terminal_size()
        lines = [shown(line, colours()) for line in lines_of(renderable, width)]
        if len(lines) >= height:  # lines that have left the screen at the top cannot be drawn over
            lines = [*lines[: height - 2], ELLIPSIS]
        back = f"\x1b[{self._height}F\x1b[J" if self._height else ""
        sys.stdout.write(back + "".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        self._height = len(lines)

    def end(self) -> None:
        sys.stdout.write(SHOW_CURSOR)
        sys.stdout.flush()


def _redraws() -> bool:
    """True if stdout is a terminal that can draw over its lines. FORCE_COLOR does not make a pipe one."""
    return sys.stdout.isatty() and os.environ.get("TERM", "dumb") != "dumb"


def colours() -> bool:
    """Whether the output has colours: see https://no-color.org and https://force-color.org."""
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or _redraws()


def _print(renderable: Renderable) -> None:
    """Prints a str as it is. Everything else is cut to the width of the terminal, or to COLUMNS; without either it is
    not cut."""
    if isinstance(renderable, str):
        click.echo(renderable)
        return
    at_a_screen = sys.stdout.isatty() or os.environ.get("COLUMNS")
    width = shutil.get_terminal_size().columns if at_a_screen else UNCUT
    for line in lines_of(renderable, width):
        click.echo(shown(line, colours()), color=True)


def _print_json(value: object, indent: int | None = None) -> None:
    click.echo(json.dumps(plain(value), indent=indent, allow_nan=False))
