"""A progress line on the terminal while a model loads or its weights or KV travel, for calls without an `on_progress`
of their own.

The line appears when that takes longer than PATIENCE_S, and is erased at the end of the call."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from djinn_client.protocol.replies import Progress
    from djinn_client.transport.connection import OnProgress

PATIENCE_S = 1.0
BAR = 24  # columns
_CLEAR = "\r\x1b[K"


class LoadingLine:
    """The progress line. It is called with each Progress, and owns the terminal's last line from when it first draws
    until `close`."""

    def __init__(self, terminal: TextIO, patience_s: float = PATIENCE_S) -> None:
        self._terminal = terminal
        self._told: Progress | None = None
        self._drawn = ""  # the line on the terminal
        self._closed = False
        self._lock = threading.Lock()  # the timer draws in a thread of its own
        self._timer = threading.Timer(patience_s, self._draw)
        self._timer.daemon = True

    def __call__(self, told: Progress) -> None:
        first, self._told = self._told is None, told
        if first:
            self._timer.start()
        elif self._drawn:
            self._draw()

    def _draw(self) -> None:
        with self._lock:
            if self._closed or self._told is None:
                return
            line = line_of(self._told, _columns(self._terminal))
            if line != self._drawn:
                self._terminal.write(_CLEAR + line)
                self._terminal.flush()
                self._drawn = line

    def close(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._closed = True
            if self._drawn:
                self._terminal.write(_CLEAR)
                self._terminal.flush()


@contextmanager
def loading_line(on_progress: OnProgress | None) -> Iterator[OnProgress | None]:
    """Yields the caller's own `on_progress`. Without one it yields a LoadingLine if stderr is a terminal, and otherwise
    None."""
    if on_progress is not None or not _is_terminal(sys.stderr):
        yield on_progress
        return
    line = LoadingLine(sys.stderr)
    try:
        yield line
    finally:
        line.close()


def line_of(told: Progress, columns: int) -> str:
    """The progress as one line that fits `columns`: `llama: reading ━━━━━━──────  6.2 of 25.0 GiB`."""
    head = f"{told.model}: {told.stage}" if told.model else told.stage
    if told.total:
        done = min(told.done, told.total)
        full = BAR * done // told.total
        unit, name = (2**30, "GiB") if told.total >= 2**30 else (2**20, "MiB")
        head += f" {'━' * full}{'─' * (BAR - full)} {done / unit:.1f} of {told.total / unit:.1f} {name}"
    return head[: columns - 1]


def _columns(terminal: TextIO) -> int:
    try:
        return os.get_terminal_size(terminal.fileno()).columns or 80
    except OSError:
        return 80


def _is_terminal(stream: TextIO | None) -> bool:
    """pythonw and some test runners have no stderr, or a closed one."""
    try:
        return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"
    except ValueError:
        return False
