"""Structured output: the kind of grammar that an output must follow, and the grammar's text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from djinn_client.errors import InvalidRequest

FormatKind = Literal["json_object", "json_schema", "regex", "lark"]


class OutputFormat(msgspec.Struct, frozen=True, omit_defaults=True):
    """`text` is the schema, the regular expression or the Lark grammar; json_object has none. If `strict`, keywords of
    a schema that a grammar cannot enforce are refused; else they are ignored, and oneOf is taken as anyOf."""

    kind: FormatKind
    text: str = ""
    strict: bool = True


def output_format(
    response_format: Mapping[str, Any] | None = None, regex: str | None = None, grammar: str | None = None
) -> OutputFormat | None:
    """The format that these keyword arguments ask for; at most one of them may be given. `response_format` has OpenAI's
    shape: {"type": "json_object"}, or {"type": "json_schema"} with the schema in `json_schema`, or directly in
    `schema`. Raises InvalidRequest."""
    given = [
        name
        for name, value in (("response_format", response_format), ("regex", regex), ("grammar", grammar))
        if value is not None
    ]
    if len(given) > 1:
        raise InvalidRequest(f"give one of {' and '.join(given)}: an output has one format", field=given[1])
    if regex is not None:
        return OutputFormat("regex", _text("regex", regex))
    if grammar is not None:
        return OutputFormat("lark", _text("grammar", grammar))
    return None if response_format is None else _of_response_format(response_format)


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is a {type(value).__name__}; it must be a str", field=name)
    return value


def _of_response_format(response_format: Mapping[str, Any]) -> OutputFormat | None:
    if not isinstance(response_format, Mapping):
        raise InvalidRequest('response_format must be a dict, such as {"type": "json_object"}', field="response_format")
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return OutputFormat("json_object")
    if kind != "json_schema":
        raise InvalidRequest(
            f"response_format has the type {kind!r}; it must be text, json_object or json_schema",
            field="response_format",
        )
    told = response_format.get("json_schema", response_format)
    schema = told.get("schema") if isinstance(told, Mapping) else None
    if not isinstance(schema, Mapping | bool):
        raise InvalidRequest('response_format has no "schema": it must be a JSON schema', field="response_format")
    try:
        return OutputFormat("json_schema", json.dumps(schema), told.get("strict") is not False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"the schema is no JSON: {error}", field="response_format") from error
