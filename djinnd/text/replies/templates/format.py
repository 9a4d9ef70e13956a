"""Reads replies by a checkpoint's own response template."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import regex

from djinnd.text.replies.format import ReplyFormat
from djinnd.text.replies.grammar import Pieces
from djinnd.text.replies.output import ReplyEvents
from djinnd.text.replies.source import CHUNK, Malformed, Reading, Source, space_before
from djinnd.text.replies.templates.spec import Delimiter, ResponseTemplate, TemplateRegion
from djinnd.text.replies.templates.values import region_value
from djinnd.text.replies.tools import Schema, Tools, as_json, is_name, parameter, types

_CALLS = "tool_calls"
_REASONING = ("thinking", "reasoning", "reasoning_content")
_MAX_DELIMITER = 4 << 10  # characters that may be the begin of a delimiter


@dataclass(frozen=True)
class TemplateFormat(ReplyFormat):
    """otherwise: the format of the family. It forces calls, as a response template only says how to read them."""

    template: ResponseTemplate
    otherwise: ReplyFormat
    name: str = "response-template"
    markers: None = None

    @property
    def has_unmarked_calls(self) -> bool:
        return self.otherwise.has_unmarked_calls

    @property
    def nine_character_ids(self) -> bool:
        return self.otherwise.nine_character_ids

    def ids_of(self, special: Mapping[str, int]) -> dict[str, int]:
        return self.otherwise.ids_of(special)

    def call_grammar(self, tools: Tools, parallel: bool, prompt: str, special: Mapping[str, int]) -> str:
        return self.otherwise.call_grammar(tools, parallel, prompt, special)

    def before_content(self, prompt: str) -> Pieces:
        return self.otherwise.before_content(prompt)

    def read(self, prompt: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        """The reply is read after the prompt's part of the message, which is not sent."""
        begun = self.template.message_start(prompt)
        source.add(begun)
        return _Reader(self.template, source, output, tools, len(begun)).read()


class _Reader:
    """`region`: the region of the current text; None: text outside all regions, which is dropped."""

    def __init__(
        self, template: ResponseTemplate, source: Source, output: ReplyEvents, tools: Tools, silent: int
    ) -> None:
        self._template = template
        self._source = source
        self._output = output
        self._tools = tools
        self._silent = silent  # characters that the prompt has written, and that are not read yet
        self._crossed = False  # an empty delimiter stands here, and must not be crossed again
        self._enter(template.implicit, {})

    def read(self) -> Reading[None]:
        while True:
            ended = self._source.ended
            rest = self._source.rest()
            found, sure = self._find(rest, ended)
            try:
                self._pass(rest, sure, at_border=found is not None or ended)
                if found:
                    self._cross(found)
                elif ended:
                    self._leave()
                    return
                else:
                    yield from self._source.more()
            except Malformed:
                self._output.give_up()
                self._enter(self._template.implicit, {})
                self._fresh = False

    def _enter(self, region: TemplateRegion | None, captures: dict[str, str]) -> None:
        self._region = region
        self._captures = captures
        self._body = ""
        self._fresh = True

    def _find(self, text: str, ended: bool) -> tuple[_Found | None, int]:
        """The delimiter that comes next, and how many characters before it, or before the begin of one, are sure."""
        sure = len(text)
        complete: list[_Found] = []
        for opens, region, delimiter in self._watched():
            found = delimiter.pattern.search(text, partial=not ended)
            if found is None or (self._crossed and not found.end()):
                continue
            if not ended and (found.partial or _may_grow(delimiter, text, found)):
                sure = min(sure, found.start())
            else:
                complete.append(_Found(found.start(), -len(found[0]), not opens, region, found))
        first = min(complete, key=lambda each: each[:3], default=None)
        if first and first.start < sure:
            return first, first.start
        return None, sure if len(text) - sure <= _MAX_DELIMITER else len(text)

    def _watched(self) -> list[tuple[bool, TemplateRegion, Delimiter]]:
        """The delimiters that may come next, with their regions. The bool says that a delimiter opens its region."""
        implicit = self._template.implicit
        if self._region is not None and self._region is not implicit:
            return [(False, self._region, self._region.closing)] if self._region.closing else []
        opening = [(True, region, region.opening) for region in self._template.regions if region.opening]
        closing = [(False, implicit, implicit.closing)] if implicit and implicit.closing else []
        return [*opening, *closing]

    def _cross(self, found: _Found) -> None:
        captures = {name: text for name, text in found.match.groupdict().items() if text is not None}
        self._crossed = not found.match[0]
        if found.closes:
            self._captures |= captures
            self._advance(len(found.match[0]))
            self._leave()
            self._source.told()
            self._enter(self._template.implicit, {})
        else:
            self._leave()
            self._source.told()
            self._enter(found.region, captures)
            self._advance(len(found.match[0]))

    def _pass(self, text: str, sure: int, at_border: bool) -> None:
        """Reads the first `sure` characters, which belong to the region. It has no white space at its ends."""
        if self._region is None:
            for begin in range(0, sure, CHUNK):
                self._advance(min(CHUNK, sure - begin))
                self._source.told()
        elif self._region.name == _CALLS:
            self._body += text[:sure]
            self._advance(sure)
        else:
            self._tell(self._region, text[:sure], at_border)

    def _tell(self, region: TemplateRegion, text: str, at_border: bool) -> None:
        body = text.rstrip() if at_border else text[: len(text) - space_before(text, len(text))]
        tell = self._output.reasoning if region.name in _REASONING else self._output.content
        for begin in range(0, len(body), CHUNK):
            part = self._advance(min(CHUNK, len(body) - begin))
            part = part.lstrip() if self._fresh else part
            self._fresh = self._fresh and not part
            tell(part)
            self._source.told()
        if at_border:
            self._advance(len(text) - len(body))

    def _advance(self, count: int) -> str:
        """Reads characters and returns them, without those of the prompt."""
        self._crossed = self._crossed and not count
        text = self._source.advance(count)
        told = text[self._silent :]
        self._silent -= len(text) - len(told)
        return told

    def _leave(self) -> None:
        """Raises Malformed for calls that the template cannot read."""
        if self._region is None or self._region.name != _CALLS:
            return
        if not self._tools:
            raise Malformed
        value = region_value(self._region, self._body, self._captures)
        calls = [_call(each, self._tools) for each in (value if isinstance(value, list) else [value])]
        for name, arguments in calls:
            self._output.call(name, arguments)


class _Found(NamedTuple):
    """In the order in which delimiters are taken: the first, then the longest, then one that opens."""

    start: int
    shortness: int
    closes: bool
    region: TemplateRegion
    match: regex.Match[str]


def _may_grow(delimiter: Delimiter, text: str, found: regex.Match[str]) -> bool:
    """True if more text could change what matched: it touches the end, or looks ahead to it."""
    if found.end() < len(text):
        if delimiter.literal:
            return False
        longer = delimiter.pattern.match(text + "\0", found.start())
        return longer is None or longer.span() != found.span() or longer.groupdict() != found.groupdict()
    return not found[0] or not delimiter.literal


def _call(value: object, tools: Tools) -> tuple[str, str]:
    function = value.get("function", value) if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping) or not is_name(str(function.get("name"))):
        raise Malformed
    name, arguments = str(function["name"]), function.get("arguments") or {}
    try:
        members = json.loads(arguments) if isinstance(arguments, str) else arguments
        typed = {key: _typed(item, parameter(tools, name, key)) for key, item in members.items()}
        return name, json.dumps(typed, ensure_ascii=False, allow_nan=False)
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise Malformed from error


def _typed(value: Any, schema: Schema) -> Any:
    """Templates that read tags give texts only; the tool's schema says their types."""
    known = types(schema)
    return json.loads(as_json(value, schema)) if isinstance(value, str) and known and known != {"string"} else value
