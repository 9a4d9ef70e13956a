"""Calls written as Python: `[get_weather(city="Paris")]`, `search.call(query="…")`, a ```tool_code block.

The syntax is what transformers publishes for its `python-call-list` content: names, keyword arguments, literals.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from djinnd.text.replies.calls.json import read_name
from djinnd.text.replies.calls.json_text import MAX_DEPTH
from djinnd.text.replies.format import CallSyntax
from djinnd.text.replies.grammar import Json, Pieces, listed
from djinnd.text.replies.output import ReplyEvents
from djinnd.text.replies.source import Malformed, Reading, Source, markers
from djinnd.text.replies.tools import Schema, Tools, members_of

_SPACE = re.compile(r"[ \t\n\r]*")
_NAME = re.compile(r"[A-Za-z_]\w*(?:[-.]\w+)*", re.ASCII)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?")
_STRING = re.compile(r"""'((?:[^'\\\n\r]|\\.)*)'|"((?:[^"\\\n\r]|\\.)*)\"""", re.DOTALL)
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
_ESCAPES = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"} | {text: text for text in "\\'\"/\n"}
_CONSTANTS = {"True": True, "true": True, "False": False, "false": False, "None": None, "null": None}

MAX_ITEMS = 4096  # of one list of calls, which is read at once: 20 ms of the server's loop

T = TypeVar("T")
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class PythonCalls(CallSyntax):
    """A list of calls: between markers, or as the whole reply where there are none."""

    begin: str = ""
    end: str = ""

    @property
    def begins(self) -> tuple[str, ...]:
        return (self.begin,) if self.begin else ()

    @property
    def starts(self) -> tuple[str, ...]:
        return () if self.begin else ("[",)

    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end)))

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        start = "" if begin else (yield from self._start(source, tools))
        text = yield from whole(source, self.end)
        tell(output, read_calls(start + text))

    def _start(self, source: Source, tools: Tools) -> Reading[str]:
        """Reads the begin of a list without a marker. Unless it calls a known tool, the text is content."""
        yield from source.expect("[")
        name, _ = yield from read_name(source, "(")
        if name not in tools:
            raise Malformed
        return f"[{name}("

    def forced(self, name: str, parameters: Schema) -> Pieces:
        return keywords(name, parameters)

    def between(self) -> tuple[str, str, str]:
        return f"{self.begin}[", ", ", f"]{self.end}"


@dataclass(frozen=True)
class ToolCode(CallSyntax):
    """Gemma 3: a ```tool_code block with one call on each line."""

    begins: tuple[str, ...] = ("```tool_code\n",)

    def markers(self) -> tuple[str, ...]:
        return ()

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        text = (yield from whole(source, "```")).strip()
        if text.startswith("print(") and text.endswith(")"):
            text = text.removeprefix("print(")[:-1]
        tell(output, read_calls(text if text.startswith("[") else "[" + ",".join(text.splitlines()) + "]"))

    def forced(self, name: str, parameters: Schema) -> Pieces:
        return keywords(name, parameters)

    def between(self) -> tuple[str, str, str]:
        return "```tool_code\n", "\n", "\n```"


def read_python_call(source: Source, output: ReplyEvents) -> Reading[None]:
    """Reads one call up to the end of the reply, as Llama 3 writes its built-in tools:
    `brave_search.call(query="…")`."""
    text = yield from whole(source, "")
    tell(output, [(name.removesuffix(".call"), arguments) for name, arguments in read_calls(f"[{text}]")])


def whole(source: Source, end: str) -> Reading[str]:
    """The text up to `end`, or up to the end of the reply."""
    parts: list[str] = []
    yield from source.until(markers(*filter(None, [end])), parts.append)
    return "".join(parts)


def tell(output: ReplyEvents, calls: list[Call]) -> None:
    if not calls:
        raise Malformed
    for name, arguments in calls:
        output.call(name, json.dumps(arguments, ensure_ascii=False))


def read_calls(text: str) -> list[Call]:
    """Raises Malformed."""
    reader = _Reader(text)
    calls = reader.items("[", "]", reader.call)
    reader.space()
    if reader.at != len(text):
        raise Malformed
    return calls


def keywords(name: str, parameters: Schema) -> Pieces:
    """A call with keyword arguments."""
    members = [((f"{key}=", Json(schema)), needed) for key, schema, needed in members_of(parameters)]
    return (f"{name}(", *listed(members, ", "), ")")


class _Reader:
    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 0
        self._items = 0  # calls, arguments, and members of lists and dictionaries so far

    def space(self) -> None:
        found = self._match(_SPACE)
        assert found
        self.at = found.end()

    def comes(self, text: str) -> bool:
        self.space()
        return self.text.startswith(text, self.at)

    def expect(self, text: str) -> None:
        if not self.comes(text):
            raise Malformed
        self.at += len(text)

    def items(self, begin: str, end: str, item: Callable[[], T]) -> list[T]:
        self.expect(begin)
        found: list[T] = []
        while not self.comes(end):
            if found:
                self.expect(",")
            self._items += 1
            if self._items > MAX_ITEMS:
                raise Malformed
            found.append(item())
        self.expect(end)
        return found

    def call(self) -> Call:
        name = self._name()
        return name, _unique(self.items("(", ")", self._argument))

    def value(self, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise Malformed
        if self.comes("'") or self.comes('"'):
            return self._string()
        if self.comes("["):
            return self.items("[", "]", lambda: self.value(depth + 1))
        if self.comes("{"):
            return _unique(self.items("{", "}", lambda: self._pair(depth + 1)))
        number = self._match(_NUMBER)
        if number:
            return self._number(number.group())
        name = self._name()
        if name not in _CONSTANTS:
            raise Malformed
        return _CONSTANTS[name]

    def _number(self, text: str) -> Any:
        self.at += len(text)
        try:
            return json.loads(text)
        except ValueError:  # more digits than Python reads
            raise Malformed from None

    def _argument(self) -> tuple[str, Any]:
        name = self._name()
        self.expect("=")
        return name, self.value()

    def _pair(self, depth: int) -> tuple[str, Any]:
        self.space()
        key = self._string()
        self.expect(":")
        return key, self.value(depth)

    def _name(self) -> str:
        self.space()
        found = self._match(_NAME)
        if not found:
            raise Malformed
        self.at = found.end()
        return found.group()

    def _string(self) -> str:
        found = self._match(_STRING)
        if not found:
            raise Malformed
        self.at = found.end()
        body = found[1] if found[1] is not None else found[2]
        return _ESCAPE.sub(_unescaped, body)

    def _match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        return pattern.match(self.text, self.at)


def _unescaped(found: re.Match[str]) -> str:
    if found[1]:
        return chr(int(found[1], 16))
    if found[2] not in _ESCAPES:
        raise Malformed
    return _ESCAPES[found[2]]


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise Malformed
    return members
