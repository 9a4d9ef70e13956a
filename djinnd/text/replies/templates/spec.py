"""A checkpoint's own `response_template`: regions of a reply, and the texts that open and close them.

transformers publishes the form (chat_response_parsing.md). Text outside all other regions goes to the region without an
opening; there is at most one. A template says where in the prompt the assistant's message starts, because templates
write its first characters themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from djinnd.text.strings import any_of

_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_MAX_FIELDS = 32


@dataclass(frozen=True)
class Delimiter:
    """`literal`: it matches these texts only, so that a complete match cannot become longer."""

    pattern: regex.Pattern[str]
    literal: bool


@dataclass(frozen=True)
class TemplateRegion:
    name: str
    opening: Delimiter | None
    closing: Delimiter | None
    content: str
    content_args: Mapping[str, Any]
    transform: Any
    transform_each: bool


@dataclass(frozen=True)
class ResponseTemplate:
    regions: tuple[TemplateRegion, ...]
    start: Delimiter

    @property
    def implicit(self) -> TemplateRegion | None:
        return next((region for region in self.regions if region.opening is None), None)

    def message_start(self, prompt: str) -> str:
        """The part of the message that the prompt already has: the text behind the last anchor."""
        end = max((found.end() for found in self.start.pattern.finditer(prompt)), default=None)
        return "" if end is None else prompt[end:]


def read_spec(spec: object) -> ResponseTemplate:
    """Raises ValueError for a template that does not follow the published form."""
    if not isinstance(spec, Mapping) or spec.get("version", 1) != 1 or not set(spec) <= _TEMPLATE_KEYS:
        raise ValueError("no response_template of version 1")
    fields = spec.get("fields")
    if not isinstance(fields, Mapping) or not 0 < len(fields) <= _MAX_FIELDS:
        raise ValueError(f"fields: an object of 1 to {_MAX_FIELDS} members")
    regions = tuple(_region(str(name), field) for name, field in fields.items())
    if sum(region.opening is None for region in regions) > 1:
        raise ValueError("more than one field without open")
    start = _delimiter(spec, "start_anchor")
    if start is None:
        raise ValueError("start_anchor is missing")
    return ResponseTemplate(regions, start)


def _region(name: str, field: object) -> TemplateRegion:
    if not isinstance(field, Mapping):
        raise ValueError(f"{name}: no object")
    arguments = field.get("content_args", {})
    if not isinstance(arguments, Mapping):
        raise ValueError(f"{name}: content_args is no object")
    return TemplateRegion(
        name,
        _delimiter(field, "open"),
        _delimiter(field, "close"),
        str(field.get("content", "text")),
        arguments,
        field.get("transform"),
        field.get("transform_each") is True,
    )


def _delimiter(spec: Mapping[str, Any], key: str) -> Delimiter | None:
    """From literal texts under `key`, or a regular expression under `key`_pattern."""
    literal, pattern = spec.get(key), spec.get(f"{key}_pattern")
    if literal is not None:
        texts = [literal] if isinstance(literal, str) else literal
        if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError(f"{key}: a text, or a list of texts")
        extends = any(one != other and one.startswith(other) for one in texts for other in texts)
        return Delimiter(regex.compile(any_of(texts)), literal=not extends)
    if pattern is None:
        return None
    try:
        return Delimiter(regex.compile(str(pattern), regex.DOTALL), literal=False)
    except regex.error as error:
        raise ValueError(f"{key}_pattern: {error}") from error
