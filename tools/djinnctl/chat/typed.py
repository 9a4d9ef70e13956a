"""Lines that the user types, made into messages and commands."""

from __future__ import annotations

from typing import NamedTuple

QUOTES = '"""'


class Command(NamedTuple):
    """A line that begins with a slash: `/set temperature 0.5` has the name `set`."""

    name: str
    argument: str


class Typed:
    """Takes lines and gives messages and commands. A message of several lines stands between two QUOTES; a slash at its
    beginning means nothing."""

    def __init__(self) -> None:
        self._lines: list[str] | None = None  # of an open message: its first QUOTES have come, its last have not

    @property
    def inside(self) -> bool:
        """True while a message of several lines is open."""
        return self._lines is not None

    def add(self, line: str) -> str | Command | None:
        """The message or the command that ends with this line; None if it is not complete yet, or nothing was typed."""
        if self._lines is not None:
            return self._go_on(self._lines, line)
        stripped = line.strip()
        if stripped.startswith(QUOTES):
            self._lines = []
            return self._go_on(self._lines, stripped.removeprefix(QUOTES))
        if stripped.startswith("/"):
            name, _, argument = stripped[1:].partition(" ")
            return Command(name.lower(), argument.strip())
        return stripped or None

    def drop(self) -> None:
        """Forgets the lines of an open message."""
        self._lines = None

    def _go_on(self, lines: list[str], line: str) -> str | None:
        last = line.rstrip()
        if not last.endswith(QUOTES):
            lines.append(line)
            return None
        self._lines = None
        whole = "\n".join([*lines, last.removesuffix(QUOTES)]).strip("\n")
        return whole if whole.strip() else None
