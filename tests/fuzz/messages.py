"""Messages made of a type's own fields, with hostile values in some of them: mutations of bytes alone seldom get past
the tag of a message."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import msgspec

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    1 << 31,
    (1 << 63) - 1,
    (1 << 64) - 1,
    -(1 << 63),
    0.5,
    float("nan"),
    float("inf"),
    -0.0,
    "",
    "x" * 5000,
    "\0",
    "../..",
    "\ud800",
    b"",
    b"\xff" * 300,
    [],
    [[]],
    [1, "a", None],
    list(range(300)),
    [[[[[[[[[[]]]]]]]]]],
    {},
    {"": 0},
    {"type": "generate"},
)


def types_of(union: types.UnionType | Any) -> list[type[msgspec.Struct]]:
    return sorted(get_args(union), key=lambda each: str(each.__struct_config__.tag))


def plain(kind: type[msgspec.Struct]) -> dict[str, Any]:
    """Fields of a message of this type as maps and lists, with a small value for each that has no default."""
    tag = kind.__struct_config__.tag
    made: dict[str, Any] = {} if tag is None else {"type": tag}
    for field in msgspec.structs.fields(kind):
        if field.required:
            made[field.encode_name] = smallest(field.type)
        elif field.default is not msgspec.NODEFAULT and field.default is not msgspec.UNSET:
            made[field.encode_name] = msgspec.to_builtins(field.default, builtin_types=(bytes,))
    return made


_SMALLEST = {int: 0, str: "s", bytes: b"", float: 0.0, bool: False, list: [], dict: {}, tuple: ()}


def smallest(hint: Any) -> Any:
    """A value that the type takes."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Literal:
        return arguments[0]
    if origin in (Union, types.UnionType, Annotated):
        return smallest(arguments[0])
    if origin is tuple:
        return [smallest(argument) for argument in arguments if argument is not ...]
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return plain(hint)
    return _SMALLEST.get(origin or hint)


class Choices:
    """Reads decisions from bytes; zeros when these are used up."""

    def __init__(self, data: bytes) -> None:
        self._data = iter(data)

    def below(self, limit: int) -> int:
        return (next(self._data, 0) | next(self._data, 0) << 8) % limit

    def rest(self) -> bytes:
        return bytes(self._data)


def hostile_message(data: bytes, kinds: list[type[msgspec.Struct]]) -> bytes:
    """msgpack of a message of one of these types, up to three of its fields changed."""
    choices = Choices(data)
    fields = plain(kinds[choices.below(len(kinds))])
    for _ in range(choices.below(4)):
        name = list(fields)[choices.below(len(fields))]
        fields[name] = HOSTILE[choices.below(len(HOSTILE))]
    if choices.below(8) == 0:
        fields["no such field"] = HOSTILE[choices.below(len(HOSTILE))]
    try:
        return msgspec.msgpack.encode(fields)
    except (OverflowError, UnicodeEncodeError):
        return choices.rest()


def seed_messages(kinds: list[type[msgspec.Struct]]) -> Iterator[bytes]:
    """One for each type, which `hostile_message` leaves as it is, and one with changes in each."""
    for number in range(len(kinds)):
        yield bytes([number & 255, number >> 8, 0, 0])
        yield bytes([number & 255, number >> 8, 3, 0, 1, 0, number % len(HOSTILE), 0, 2, 0, 9, 0, 3, 0, 20, 0])
