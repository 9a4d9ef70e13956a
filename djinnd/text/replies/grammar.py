"""Writes grammars in llguidance's Lark dialect: the syntax of a family's tool calls, for forced calls."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from djinnd.text.replies.tools import Schema, quoted
from djinnd.text.strings import any_of

# Whitespace between two parts of a JSON text: a space, or a line break with an indentation. llguidance's default has no
# bound, and a small model that begins with blanks writes blanks to its last token.
JSON_OPTIONS = {"whitespace_pattern": r" |\n[ \t]{0,24}"}


@dataclass(frozen=True)
class Json:
    """JSON that follows the schema."""

    schema: Schema


@dataclass(frozen=True)
class Until:
    """Any text, up to and with `end`."""

    end: str


@dataclass(frozen=True)
class Maybe:
    pieces: tuple[Piece, ...]


@dataclass(frozen=True)
class Either:
    choices: tuple[str, ...]


def arguments(parameters: Schema) -> Json:
    return Json(parameters or {"type": "object"})


@dataclass(frozen=True)
class Space:
    """White space, or none."""


Piece = str | Json | Until | Maybe | Either | Space  # a text is meant literally
Pieces = tuple[Piece, ...]


def listed(members: Sequence[tuple[Pieces, bool]], comma: str) -> Pieces:
    """Joins members with commas. The bool of a member says that it is required; required members come first. If none is
    required, a member can only follow the members before it, so that no comma is left over."""
    required = [pieces for pieces, needed in members if needed]
    optional = [pieces for pieces, needed in members if not needed]
    if required:
        following = tuple(piece for pieces in required[1:] for piece in (comma, *pieces))
        return (*required[0], *following, *(Maybe((comma, *pieces)) for pieces in optional))
    chain: Pieces = ()
    for pieces in reversed(optional[1:]):
        chain = (Maybe((comma, *pieces, *chain)),)
    return (Maybe((*optional[0], *chain)),) if optional else ()


def lark(
    before: Pieces,
    calls: Sequence[Pieces],
    between: tuple[str, str, str],
    parallel: bool,
    special: Mapping[str, int],
) -> str:
    """Writes the grammar of a reply: the pieces `before`, then one of `calls`, or several if `parallel`. `between`:
    text before the first call, between two calls, and after the last. `special`: ids of tokens that have no text."""
    assert calls
    first, separator, last = between
    writer = _Writer(special)
    more = f" ({writer.write((separator,))} call)*" if parallel else ""
    writer.rules.append(f"start: {writer.write((*before, first))} call{more} {writer.write((last,))}")
    writer.rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(calls))))
    for number, pieces in enumerate(calls):
        writer.rules.append(f"call_{number}: {writer.write(pieces)}")
    return "\n".join(writer.rules) + "\n"


def lark_around(before: Pieces, special: Mapping[str, int]) -> str:
    """Writes the grammar of a reply: the pieces `before`, then the content, which is the rule @answer."""
    writer = _Writer(special)
    start = f"start: {writer.write((*before,))} @answer"
    return "\n".join([start, *writer.rules]) + "\n"


class _Writer:
    def __init__(self, special: Mapping[str, int]) -> None:
        self.rules: list[str] = []
        self._special = special
        self._split = re.compile(f"({any_of(filter(None, special))})")

    def write(self, pieces: Pieces) -> str:
        return " ".join(filter(None, map(self._piece, pieces)))

    def _piece(self, piece: Piece) -> str:
        match piece:
            case str():
                return self._literal(piece)
            case Json(schema):
                return f"%json {json.dumps({'x-guidance': JSON_OPTIONS} | dict(schema))}"
            case Until(end):
                return self._until(end)
            case Space():
                return r"/\s{0,4}/"
            case Maybe(inner):
                return f"({self.write(inner)})?"
            case Either(choices):
                return "(" + " | ".join(map(self._literal, choices)) + ")"

    def _literal(self, text: str) -> str:
        parts = filter(None, self._split.split(text))
        return " ".join(f"<[{self._special[part]}]>" if part in self._special else quoted(part) for part in parts)

    def _until(self, end: str) -> str:
        if end in self._special:
            return f"/(?s:.*)/ {self._literal(end)}"
        rule = f"text_{len(self.rules)}_{len(end)}"
        line = f"{rule}[suffix={quoted(end)}]: /(?s:.*)/"
        if line not in self.rules:
            self.rules.append(line)
        return rule
