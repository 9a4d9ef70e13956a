"""Counts the values of a JSON text, so that decoding any accepted text takes milliseconds.

Bodies are decoded on the event loop, which also serves all streams. A long text costs little there, but a list costs a
Python object for each member: 8 MiB of `[],[],…` take seconds. So the marks outside of texts are counted first.
"""

from __future__ import annotations

from djinnd.gateway.http.errors import HttpError

MAX_VALUES = 1 << 18  # numbers, texts, lists and objects of one body; a token of a prompt is one
MAX_TEXTS = 1 << 16  # keys, too
MAX_NESTS = 1 << 15  # lists and objects
_SMALL = 2 * MAX_NESTS  # bytes; a list or an object takes two at the least


def count_values(content: bytes) -> int:
    """An upper bound. Raises HttpError for a text with too many values to decode. A text that is no JSON may pass: the
    decoder refuses it."""
    if len(content) <= _SMALL:
        return len(content) // 2
    outside = _outside_of_texts(content)
    nests = outside.count(b"[") + outside.count(b"{")
    values = outside.count(b",") + nests + 1
    if nests > MAX_NESTS:
        raise _too_many(nests, "lists and objects", MAX_NESTS)
    if values > MAX_VALUES:
        raise _too_many(values, "values", MAX_VALUES)
    return values


def _outside_of_texts(content: bytes) -> bytes:
    """The content without its texts. Raises HttpError for too many texts."""
    if b"\\" in content:
        content = content.replace(b"\\\\", b"").replace(b'\\"', b"")  # now each quote begins or ends a text
    texts = content.count(b'"') // 2
    if texts > MAX_TEXTS:
        raise _too_many(texts, "texts", MAX_TEXTS)
    return b"".join(content.split(b'"')[::2])


def _too_many(count: int, what: str, limit: int) -> HttpError:
    return HttpError(
        413, f"the body has {count:,} {what}, the limit is {limit:,}: send it in parts", code="too_many_values"
    )
