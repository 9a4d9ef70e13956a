"""The demo's output: lines that fit a terminal of 80 columns."""

from __future__ import annotations

import os
import sys
import textwrap

COLUMNS = 78
INDENT = "    "
SAID = f"{INDENT}| "
WIDTH = COLUMNS - len(SAID)  # of an answer
BOLD, DIM, CYAN, PLAIN = "\x1b[1m", "\x1b[2m", "\x1b[1;36m", "\x1b[0m"


def _styled(text: str, style: str) -> str:
    return f"{style}{text}{PLAIN}" if sys.stdout.isatty() and not os.environ.get("NO_COLOR") else text


def title(text: str) -> None:
    print(f"\n{_styled(text, CYAN)}", flush=True)


def code(text: str) -> None:
    """A line of Python or of the shell."""
    print(_styled(textwrap.indent(text, INDENT), BOLD), flush=True)


def note(text: str) -> None:
    print(_styled(textwrap.fill(text, COLUMNS, initial_indent=INDENT, subsequent_indent=INDENT), DIM), flush=True)


def answer(text: str) -> None:
    said = Said()
    said.add(text)
    said.end()


class Said:
    """Writes a text that comes in pieces, and wraps it between words."""

    def __init__(self) -> None:
        self._column = 0
        self._word = ""

    def add(self, piece: str) -> None:
        for character in piece:
            if character == "\n":
                self._put_word()
                self._break()
            elif character == " ":
                self._put_word()
                self._word = " "
            else:
                if len(self._word) == WIDTH:
                    self._put_word()
                self._word += character
        sys.stdout.flush()

    def end(self) -> None:
        self._put_word()
        self._break()
        sys.stdout.flush()

    def _put_word(self) -> None:
        if self._column + len(self._word) > WIDTH:
            self._break()
        if not self._column:
            self._word = self._word.lstrip()
            sys.stdout.write(SAID if self._word else "")
        sys.stdout.write(self._word)
        self._column += len(self._word)
        self._word = ""

    def _break(self) -> None:
        if self._column:
            sys.stdout.write("\n")
        self._column = 0
