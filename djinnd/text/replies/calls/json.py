"""Tool calls that are JSON: {"name": …, "arguments": {…}}, and names that come before JSON arguments."""

from __future__ import annotations

import json

from djinnd.text.replies.calls.json_text import object_text, read_string, value
from djinnd.text.replies.output import ReplyEvents
from djinnd.text.replies.source import Malformed, Reading, Source, markers
from djinnd.text.replies.tools import MAX_NAME, Tools, is_name

ARGUMENTS = ("arguments", "parameters")
_NO_ARGUMENTS = ("null", '""')


def call_object(source: Source, output: ReplyEvents, known: Tools | None = None) -> Reading[None]:
    """One object with a name and arguments, in any order. Arguments are told while they arrive if the name comes first.
    `known`: any other name is malformed."""
    yield from source.expect("{")
    name = call_id = held = ""
    begun = False
    while (yield from _next_member(source)):
        key = yield from _key(source)
        if key == "name" and not name:
            name = yield from read_string(source)
            if not is_name(name) or (known is not None and name not in known):
                raise Malformed
        elif key == "id" and not begun and (yield from source.peek()) == '"':
            call_id = yield from read_string(source)
        elif key in ARGUMENTS and not begun and not held:
            if name:
                begun = True
                yield from arguments(source, output, name, call_id)
            else:
                held = yield from _read_arguments(source)
        else:
            yield from value(source, _ignore)
    if not name:
        raise Malformed
    if not begun:
        output.begin(name, call_id)
        output.arguments(held or "{}")
    output.end()


def call_list(source: Source, output: ReplyEvents) -> Reading[None]:
    """One or more objects between brackets."""
    yield from source.expect("[")
    while True:
        yield from source.space()
        yield from call_object(source, output)
        yield from source.space()
        if (yield from source.expect(",", "]")) == "]":
            return


def arguments(source: Source, output: ReplyEvents, name: str, call_id: str = "") -> Reading[None]:
    """Begins the call, and tells its arguments as they are written."""
    yield from source.space()
    if (yield from source.peek()) == "{":
        output.begin(name, call_id)
        yield from value(source, output.arguments)
        return
    text = yield from _read_arguments(source)
    output.begin(name, call_id)
    output.arguments(text)


def read_name(source: Source, *ends: str) -> Reading[tuple[str, str]]:
    """A function's name, and the marker after it."""
    parts: list[str] = []
    yield from source.space()
    end = yield from source.until(markers(*ends), parts.append, most=2 * MAX_NAME)
    name = "".join(parts).strip()
    if not end or not is_name(name):
        raise Malformed
    return name, end


def _read_arguments(source: Source) -> Reading[str]:
    """Arguments that cannot be told while they arrive. Some models write the object as a string, or null."""
    parts: list[str] = []
    yield from value(source, parts.append)
    text = "".join(parts).strip()
    if text in _NO_ARGUMENTS:
        return "{}"
    if text.startswith('"'):
        text = json.loads(text)
    return object_text(text)


def _next_member(source: Source) -> Reading[bool]:
    yield from source.space()
    return (yield from source.comes("}", ",")) != "}"


def _key(source: Source) -> Reading[str]:
    yield from source.space()
    key = yield from read_string(source)
    yield from source.space()
    yield from source.expect(":")
    yield from source.space()
    return key


def _ignore(text: str) -> None:
    """Drops a member other than name, arguments and id."""
