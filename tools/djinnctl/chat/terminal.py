"""The terminal: reads lines with history and editing, and writes answers."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

PROMPT, FURTHER = ">>> ", "... "
HISTORY_LINES = 1000
DIM, PLAIN = "\x1b[2m", "\x1b[0m"
# Control characters in a model's text could move the cursor or rename the window, so symbols stand for them.
_VISIBLE = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
_VISIBLE |= {0x7F: "\u2421"} | dict.fromkeys(range(0x80, 0xA0), "\ufffd")


def visible(text: str) -> str:
    return text.translate(_VISIBLE)


class Answer:
    """Writes one answer: its content, and on a terminal its reasoning before that, dimmed."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._terminal = out.isatty()
        self._colours = self._terminal and not os.environ.get("NO_COLOR")
        self.begun = False  # something has come
        self._reasoning = False  # is what was written last
        self._last = "\n"

    def reason(self, text: str) -> None:
        """Writes reasoning on a terminal only: programs that read the output want the answer alone."""
        if text and self._terminal:
            if not self._reasoning:
                self._write(DIM if self._colours else "(")
                self._reasoning = True
            self._write(visible(text))

    def content(self, text: str) -> None:
        if text:
            self._end_reasoning()
            self._write(visible(text) if self._terminal else text)

    def end(self) -> None:
        """Ends the line, so that the next text begins at the left."""
        self._end_reasoning()
        if self._last != "\n":
            self._write("\n")

    def _end_reasoning(self) -> None:
        if self._reasoning:
            self._reasoning = False
            self._write(PLAIN if self._colours else ")")
            self._write("\n\n")

    def _write(self, text: str) -> None:
        self.begun = True
        self._out.write(text)
        self._out.flush()
        self._last = text[-1]


@contextmanager
def history() -> Iterator[None]:
    """Lets the user edit lines and bring back those of earlier conversations. Without readline it does nothing."""
    try:
        import readline
    except ImportError:
        yield
        return
    file = history_file()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        readline.read_history_file(file)
    readline.set_history_length(HISTORY_LINES)
    try:
        yield
    finally:
        with suppress(OSError):
            os.close(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600))
            readline.write_history_file(file)


def history_file() -> Path:
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "djinnctl" / "history"


def note(text: str) -> None:
    """Writes a line of djinnctl's own to stderr, dimmed."""
    colours = sys.stderr.isatty() and not os.environ.get("NO_COLOR")
    print(f"{DIM}{text}{PLAIN}" if colours else text, file=sys.stderr, flush=True)
