"""Errors for wrong options, in the caller's words. msgspec names the types of a field, not the option and its value."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin, get_type_hints

_TYPES = {
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "bool": "True or False",
    "bytes": "bytes",
    "array": "a list",
    "object": "a dict",
    "null": "None",
}
_HINTS = {
    "logprobs": "0 tells that of the chosen token, and n those of the n likeliest, too",
    "prompt_logprobs": "0 tells those of the prompt's tokens, and n those of the n likeliest, too",
}
_BOUNDS = {"<=": "at most", "<": "less than", ">=": "at least", ">": "more than"}
_MOST_SHOWN = 80  # characters of a value

_PATH = r" - at `\$\.([\w.\[\]]+)`"
_TYPE = re.compile(r"Expected `([^`]+)`, got `[^`]+`" + _PATH)
_BOUND = re.compile(r"Expected `\w+`( of length)? (<=|<|>=|>) (-?\d+)" + _PATH)
_WORD = re.compile(r"Invalid enum value .*" + _PATH, re.DOTALL)
_SOME = "[]"  # stands in a path for an entry: msgspec does not say which one


def mistake(kind: type, fields: Mapping[str, Any], account: str) -> str:
    """A sentence for the caller. `account` is msgspec's reason why a message of this kind cannot have these fields."""
    account = re.sub(r"`key` in `([^`]+)`", rf"`\1{_SOME}`", account.replace("[...]", _SOME))
    if found := _TYPE.fullmatch(account):
        types = [_TYPES.get(name, name) for name in found[1].split(" | ")]
        return _told(found[2], fields, f"it must be {' or '.join(types)}")
    if found := _BOUND.fullmatch(account):
        length, sign, bound, path = found.groups()
        limit = f"{_BOUNDS[sign]} {int(bound):,}"
        if length and not path.endswith(_SOME):
            return f"{_name(path)} has {len(_value(path, fields)):,} entries: {limit}"
        return _told(path, fields, f"its length must be {limit}" if length else f"it must be {limit}")
    if found := _WORD.fullmatch(account):
        words = _words(get_type_hints(kind).get(found[1]))
        return _told(found[1], fields, f"it must be one of {', '.join(words)}")
    return f"{kind.__name__}: {account}"


def _told(path: str, fields: Mapping[str, Any], wanted: str) -> str:
    name = _name(path)
    if name.endswith(_SOME):
        return f"something in {name.removesuffix(_SOME)} is wrong: {wanted}"
    shown = repr(_value(path, fields))
    shown = shown if len(shown) <= _MOST_SHOWN else shown[:_MOST_SHOWN] + "…"
    hint = f": {_HINTS[name]}" if name in _HINTS else ""
    return f"{name} is {shown}; {wanted}{hint}"


def _name(path: str) -> str:
    """The option's own name: for the caller, fields of `sampling` are options like others."""
    return path.rpartition(".")[2]


def _value(path: str, fields: Mapping[str, Any]) -> Any:
    value: Any = fields
    for name in re.findall(r"\w+", path):
        value = value[name] if isinstance(value, Mapping) else value[int(name)]
    return value


def _words(hint: Any) -> list[str]:
    """The words of a Literal, which may be one of several types of a hint."""
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [word for part in get_args(hint) for word in _words(part)]
