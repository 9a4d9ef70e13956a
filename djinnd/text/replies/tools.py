"""The tools that a request offers, by name, and values that models write in other ways than JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

Schema = Mapping[str, Any]
Tools = Mapping[str, Schema]  # name → JSON schema of the parameters

MAX_NAME = 256
_NAME = re.compile(rf"[^\s<>{{}}()\[\]\"'`]{{1,{MAX_NAME}}}")
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}
_MAX_SCHEMAS = 64  # choices of anyOf and oneOf that are looked at


def tools_by_name(tools: Sequence[Any]) -> dict[str, Schema]:
    """From OpenAI's list of tools. An entry that is no function is passed over."""
    functions = [tool.get("function", tool) for tool in tools if isinstance(tool, Mapping)]
    named = [function for function in functions if isinstance(function, Mapping) and function.get("name")]
    return {str(function["name"]): _mapping(function.get("parameters")) for function in named}


def is_name(text: str) -> bool:
    """True if a function can have this name."""
    return _NAME.fullmatch(text) is not None


def parameter(tools: Tools, function: str, name: str) -> Schema:
    """The parameter's schema; an empty one if it is unknown."""
    properties = _mapping(tools.get(function, {}).get("properties"))
    return _mapping(properties.get(name))


def members_of(parameters: Schema) -> list[tuple[str, Schema, bool]]:
    """Name, schema, and whether it is required, for each parameter."""
    required = parameters.get("required")
    needed = required if isinstance(required, list) else []
    return [(key, _mapping(schema), key in needed) for key, schema in _mapping(parameters.get("properties")).items()]


def types(schema: Schema) -> frozenset[str]:
    """JSON types that the schema allows, by the first _MAX_SCHEMAS of its choices; empty if it does not say."""
    found: set[str] = set()
    choices = [schema]
    for each in choices:  # which grows meanwhile
        declared = each.get("type")
        names = [declared] if isinstance(declared, str) else declared if isinstance(declared, list) else []
        found.update(name for name in names[:_MAX_SCHEMAS] if isinstance(name, str))
        for union in ("anyOf", "oneOf"):
            inner = each.get(union)
            room = _MAX_SCHEMAS - len(choices)
            choices += map(_mapping, inner[:room] if isinstance(inner, list) else [])
    return frozenset(found)


def is_string(schema: Schema) -> bool:
    return types(schema) == {"string"}


def as_json(text: str, schema: Schema) -> str:
    """The JSON of a value that a model wrote without quotes. Text that is JSON of an allowed type stays as it is, and
    other text becomes a string."""
    allowed = types(schema)
    stripped = text.strip()
    candidate = _CONSTANTS.get(stripped, stripped)
    try:
        read = json.loads(candidate)
    except (ValueError, RecursionError):
        return quoted(text)
    if isinstance(read, str) or candidate in ("NaN", "Infinity", "-Infinity"):
        return quoted(text)
    return candidate if not allowed or _type(read) & allowed else quoted(text)


def quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _type(value: object) -> frozenset[str]:
    if value is None:
        return frozenset({"null"})
    if isinstance(value, bool):
        return frozenset({"boolean"})
    if isinstance(value, int):
        return frozenset({"integer", "number"})
    if isinstance(value, float):
        return frozenset({"integer", "number"} if value.is_integer() else {"number"})
    return frozenset({"object"} if isinstance(value, dict) else {"array"})


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
