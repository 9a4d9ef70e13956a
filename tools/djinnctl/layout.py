"""Lines and tables for a terminal: styled text, columns that are cut to its width, and nothing that wraps by itself."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

_CODES = {"bold": 1, "dim": 2, "red": 31, "green": 32, "yellow": 33, "magenta": 35}
ELLIPSIS = "…"


class Span(NamedTuple):
    """Text of one style: words of _CODES, or nothing."""

    text: str
    style: str = ""

    def shown(self, colours: bool) -> str:
        codes = ";".join(str(_CODES[word]) for word in self.style.split())
        return f"\x1b[{codes}m{self.text}\x1b[0m" if colours and codes and self.text else self.text


Line: TypeAlias = tuple[Span, ...]
Cell: TypeAlias = str | Span


def line(*parts: Cell) -> Line:
    return tuple(part if isinstance(part, Span) else Span(part) for part in parts)


class Column(NamedTuple):
    """`yields`: how early it is cut where a table is too wide: 0 never, 2 before the others."""

    heading: str
    to_the_right: bool = False
    yields: int = 1


@dataclass
class Table:
    columns: list[Column]
    rows: list[Sequence[Cell]] = field(default_factory=list)

    def add_row(self, *cells: Cell) -> None:
        assert len(cells) == len(self.columns)
        self.rows.append(cells)

    def lines(self, width: int) -> Iterator[Line]:
        headings = [Span(column.heading, "bold") for column in self.columns]
        rows = [headings, *(line(*row) for row in self.rows)]
        natural = [max(columns(row[i].text) for row in rows) for i in range(len(self.columns))]
        widths = _fitted(natural, [column.yields for column in self.columns], width - (len(self.columns) - 1))
        for row in rows:
            yield self._line(row, widths)

    def _line(self, row: Sequence[Span], widths: Sequence[int]) -> Line:
        spans: list[Span] = []
        for column, span, width in zip(self.columns, row, widths, strict=True):
            text = cut(span.text, width)
            space = " " * (width - columns(text))
            before, after = (space, "") if column.to_the_right else ("", space)
            spans += [Span(before), Span(text, span.style), Span(after + " ")]
        return tuple(spans)


def new_table(*headings: str) -> Table:
    """A heading that ends in `>` has its numbers to the right."""
    return Table([Column(heading.rstrip(">"), heading.endswith(">")) for heading in headings])


class Group(tuple["Renderable", ...]):
    """Parts, one below the other."""

    def __new__(cls, *parts: Renderable) -> Group:
        return super().__new__(cls, parts)


Renderable: TypeAlias = str | Span | Line | Table | Group


def lines_of(renderable: Renderable, width: int) -> Iterator[Line]:
    """Lines of at most `width` columns: tables are cut, texts are wrapped at spaces."""
    match renderable:
        case Table():
            yield from renderable.lines(width)
        case Group():
            for part in renderable:
                yield from lines_of(part, width)
        case Span():
            yield from _wrapped((renderable,), width)
        case str():
            for text in renderable.split("\n"):
                yield from _wrapped((Span(text),), width)
        case _:
            yield from _wrapped(renderable, width)


def shown(line: Line, colours: bool) -> str:
    if not colours:
        return "".join(span.text for span in line).rstrip()
    return "".join(span.shown(colours) for span in line)


def columns(text: str) -> int:
    """The columns of a terminal that the text takes: two for a wide character."""
    if text.isascii():
        return len(text)
    return sum(1 + (unicodedata.east_asian_width(character) in "WF") for character in text)


def cut(text: str, width: int) -> str:
    """The text, or as much of it as fits before an ellipsis."""
    if columns(text) <= width:
        return text
    while text and columns(text) > width - 1:
        text = text[:-1]
    return text + ELLIPSIS if width > 0 else ""


def _fitted(natural: Sequence[int], yields: Sequence[int], room: int) -> list[int]:
    """Widths that have room together: the widest of the columns that yield first gives a character, again and again."""
    widths = list(natural)
    for grade in (2, 1):
        givers = [i for i, each in enumerate(yields) if each >= grade]
        while sum(widths) > room and any(widths[i] > 1 for i in givers):
            widths[max(givers, key=lambda i: widths[i])] -= 1
    return widths


def _wrapped(line: Line, width: int) -> Iterator[Line]:
    """Breaks at spaces, and within a word that is longer than a line."""
    words = [(character, span.style) for span in line for character in span.text]
    while len(words) > width:
        space = max((i for i in range(min(width + 1, len(words))) if words[i][0] == " "), default=0)
        end = space or width
        yield _spans(words[:end])
        words = words[end + bool(space) :]
    yield _spans(words)


def _spans(styled: Sequence[tuple[str, str]]) -> Line:
    spans: list[Span] = []
    for character, style in styled:
        if spans and spans[-1].style == style:
            spans[-1] = Span(spans[-1].text + character, style)
        else:
            spans.append(Span(character, style))
    return tuple(spans)
