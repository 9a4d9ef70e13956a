"""Names the fields of a body that its struct lacks, so that the reply can say that they had no effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import msgspec

MAX_OBJECTS = 10_000  # inside one body that are looked at, about 10 ms of the gateway's loop


def unknown_fields(body: msgspec.Struct, sent: Mapping[str, msgspec.Raw]) -> Iterator[str]:
    """Names each field of `sent` that has no place in `body`, and each such field inside others.

    A name has the fields around it, such as `messages.content.citations`, without the numbers of a list's items. Fields
    that are declared as Any or Raw are passed on whole and not looked into.
    """
    known = _attributes(type(body))
    left = [MAX_OBJECTS]
    for name, raw in sent.items():
        if name not in known:
            yield name
        elif _has_struct(value := getattr(body, known[name])):
            yield from _inside(name, value, msgspec.json.decode(raw), left)


def _inside(where: str, value: Any, sent: Any, left: list[int]) -> Iterator[str]:
    if isinstance(value, list):
        for each, told in zip(value, sent, strict=True):
            yield from _inside(where, each, told, left)
    elif isinstance(value, msgspec.Struct) and left[0] > 0:
        left[0] -= 1
        known = _attributes(type(value))
        for name, told in sent.items():
            if name not in known:
                yield f"{where}.{name}"
            else:
                yield from _inside(f"{where}.{name}", getattr(value, known[name]), told, left)


def _has_struct(value: Any) -> bool:
    return isinstance(value, msgspec.Struct) or (isinstance(value, list) and any(map(_has_struct, value[:1])))


@cache  # msgspec evaluates the annotations anew each time, 0.2 ms of every request
def _attributes(kind: type[msgspec.Struct]) -> dict[str, str]:
    """The attribute of each field, by the field's name in JSON."""
    return {field.encode_name: field.name for field in msgspec.structs.fields(kind)}
