"""The values of a response template's regions: content parsers and transforms, as transformers publishes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import regex

from djinnd.text.replies.calls.python import read_calls
from djinnd.text.replies.source import Malformed
from djinnd.text.replies.templates.spec import TemplateRegion

Arguments = Mapping[str, Any]

_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
_BARE_KEY = regex.compile(r'"(?:\\.|[^"\\])*"|(?<=[{,])(\s*)(\w+)(\s*):')
_MAX_NESTED = 8


def region_value(region: TemplateRegion, body: str, captures: Mapping[str, str]) -> Any:
    """Parses and transforms a region's text. Raises Malformed."""
    try:
        value = _parse(body, region.content, region.content_args)
        if region.transform is None:
            return value
        if region.transform_each:
            return [_transform(region.transform, {**captures, **item}) for item in value]
        return _transform(region.transform, {**captures, "content": value})
    except (ValueError, TypeError, KeyError, RecursionError, regex.error) as error:
        raise Malformed from error


def _parse(text: str, name: str, arguments: Arguments, depth: int = 0) -> Any:
    if depth > _MAX_NESTED:
        raise ValueError("content parsers inside content parsers")
    return _PARSERS[name](text, arguments, depth)


def _text(text: str, arguments: Arguments, depth: int) -> str:
    return text.strip() if arguments.get("strip", True) else text


def _json(text: str, arguments: Arguments, depth: int) -> Any:
    """`string_delims`: pairs of markers around strings. `unquoted_keys`: keys may stand without quotes."""
    for begin, end in arguments.get("string_delims", []):
        pattern = regex.compile(regex.escape(begin) + "(.*?)" + regex.escape(end), regex.DOTALL)
        text = pattern.sub(lambda found: json.dumps(found[1]), text)
    if arguments.get("unquoted_keys"):
        text = _BARE_KEY.sub(lambda found: f'{found[1]}"{found[2]}"{found[3]}:' if found[2] else found[0], text)
    try:
        return json.loads(text)
    except ValueError:
        if arguments.get("allow_non_json"):
            return text.strip()
        raise


def _xml(text: str, arguments: Arguments, depth: int) -> dict[str, Any]:
    members: dict[str, Any] = {}
    merged: set[str] = set()
    for found in regex.finditer(arguments["tag_pattern"], text, flags=regex.DOTALL):
        groups = found.groupdict()
        key, value = groups["key"], _inner(groups.get("value") or "", arguments, depth)
        if key in members and arguments.get("merge_duplicates"):
            members[key] = [*members[key], value] if key in merged else [members[key], value]
            merged.add(key)
        else:
            members[key] = value
    return members


def _lines(text: str, arguments: Arguments, depth: int) -> dict[str, Any]:
    separator = arguments.get("kv_sep", ":")
    lines = [line.split(separator, 1) for line in text.split(arguments.get("line_sep", "\n")) if separator in line]
    return {key.strip(): _inner(value.strip(), arguments, depth) for key, value in lines}


def _calls(text: str, arguments: Arguments, depth: int) -> list[dict[str, Any]]:
    return [{"name": name, "arguments": members} for name, members in read_calls(text)]


def _inner(text: str, arguments: Arguments, depth: int) -> Any:
    parser = arguments.get("value_parser")
    return text if parser is None else _parse(text, parser.get("name", "text"), parser.get("args", {}), depth + 1)


_PARSERS: dict[str, Callable[[str, Arguments, int], Any]] = {
    "text": _text,
    "int": lambda text, arguments, depth: int(text.strip()),
    "float": lambda text, arguments, depth: float(text.strip()),
    "bool": lambda text, arguments, depth: text.strip().lower() in ("true", "1"),
    "json": _json,
    "xml-inline": _xml,
    "kv-lines": _lines,
    "python-call-list": _calls,
}


def _transform(form: Any, scope: Mapping[str, Any]) -> Any:
    """The form with each text "{name.key}" replaced by the scope's value."""
    if isinstance(form, Mapping):
        return {key: _transform(value, scope) for key, value in form.items()}
    if isinstance(form, list):
        return [_transform(value, scope) for value in form]
    found = _PLACEHOLDER.fullmatch(form) if isinstance(form, str) else None
    if not found:
        return form
    root, *keys = found[1].split(".")
    value = scope[root]
    for key in keys:
        value = value[key]
    return value
