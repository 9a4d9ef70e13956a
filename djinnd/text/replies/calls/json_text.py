"""JSON text, checked and passed on as it is written while it arrives."""

from __future__ import annotations

import json
import re

from djinnd.text.replies.source import Malformed, Reading, Source, Tell

MAX_DEPTH = 64
_MAX_WORD = 512  # digits of a number
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD = re.compile(r"[-+.0-9A-Za-z]*")
_SCALAR = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?|true|false|null")
_ESCAPE = re.compile(r'\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})')
_SPACE = re.compile(r"[ \t\n\r]*")


def value(source: Source, tell: Tell) -> Reading[None]:
    """One JSON value. Raises Malformed at the first character that JSON does not have there."""
    closing: list[str] = []
    while True:
        yield from _space(source, tell)
        if (yield from _opened(source, tell, closing)):
            continue
        if (yield from _closed(source, tell, closing)):
            return


def string(source: Source, tell: Tell) -> Reading[None]:
    tell((yield from source.expect('"')))
    while True:
        tell(source.match(_PLAIN))
        following = yield from source.peek()
        if following == '"':
            tell((yield from source.take(1)))
            return
        if following == "\\":
            yield from _escape(source, tell)
        elif not following or following < " ":
            raise Malformed


def read_string(source: Source) -> Reading[str]:
    parts: list[str] = []
    yield from string(source, parts.append)
    return str(json.loads("".join(parts)))


def object_text(text: str) -> str:
    """Returns the text of a JSON object as it is. Raises Malformed for any other text."""
    try:
        if isinstance(json.loads(text), dict):
            return text
    except (ValueError, RecursionError):
        pass
    raise Malformed


def _opened(source: Source, tell: Tell, closing: list[str]) -> Reading[bool]:
    """Reads a scalar, or the begin of an object or a list. True if a value comes next."""
    following = yield from source.peek()
    if following == '"':
        yield from string(source, tell)
        return False
    if following not in ("{", "["):
        yield from _scalar(source, tell)
        return False
    if len(closing) == MAX_DEPTH:
        raise Malformed
    tell((yield from source.take(1)))
    closing.append("}" if following == "{" else "]")
    yield from _space(source, tell)
    if (yield from source.peek()) == closing[-1]:
        return False
    if following == "{":
        yield from _key(source, tell)
    return True


def _closed(source: Source, tell: Tell, closing: list[str]) -> Reading[bool]:
    """Reads what follows a value. False if another value comes."""
    while closing:
        yield from _space(source, tell)
        following = yield from source.expect(closing[-1], ",")
        tell(following)
        if following == ",":
            yield from _space(source, tell)
            if closing[-1] == "}":
                yield from _key(source, tell)
            return False
        closing.pop()
    return True


def _key(source: Source, tell: Tell) -> Reading[None]:
    yield from string(source, tell)
    yield from _space(source, tell)
    tell((yield from source.expect(":")))


def _scalar(source: Source, tell: Tell) -> Reading[None]:
    word = ""
    while (yield from source.peek()) and (part := source.match(_WORD, _MAX_WORD - len(word))):
        word += part
    if not _SCALAR.fullmatch(word):
        raise Malformed
    tell(word)


def _escape(source: Source, tell: Tell) -> Reading[None]:
    text = yield from source.take(2)
    if text == "\\u":
        text += yield from source.take(4)
    if not _ESCAPE.fullmatch(text):
        raise Malformed
    tell(text)


def _space(source: Source, tell: Tell) -> Reading[None]:
    while (yield from source.peek()) in (" ", "\t", "\n", "\r"):
        tell(source.match(_SPACE))
