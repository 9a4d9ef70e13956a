"""Gemma's own tool calls: `<|tool_call>call:NAME{city:<|"|>Paris<|"|>,days:3}<tool_call|>`, and FunctionGemma's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from djinnd.text.replies.calls.json_text import object_text
from djinnd.text.replies.calls.python import whole
from djinnd.text.replies.format import Marked
from djinnd.text.replies.grammar import Json, Pieces, Until, listed
from djinnd.text.replies.output import ReplyEvents
from djinnd.text.replies.source import Malformed, Reading, Source
from djinnd.text.replies.tools import Schema, Tools, is_name, is_string, members_of, quoted

_HEAD = re.compile(r"\s*call:([^{]+)(\{.*\})\s*", re.DOTALL)


@dataclass(frozen=True)
class GemmaCalls(Marked):
    """quote: the marker at both ends of a string."""

    begin: str = "<|tool_call>"
    end: str = "<tool_call|>"
    quote: str = '<|"|>'

    def markers(self) -> tuple[str, ...]:
        return (self.begin, self.end, self.quote)

    def read(self, begin: str, source: Source, output: ReplyEvents, tools: Tools) -> Reading[None]:
        text = yield from whole(source, self.end)
        found = _HEAD.fullmatch(text)
        if not found or not is_name(found[1].strip()):
            raise Malformed
        output.call(found[1].strip(), self._arguments(found[2]))

    def _arguments(self, text: str) -> str:
        """Converts the arguments to JSON: strings and keys get quotes."""
        parts = text.split(self.quote)
        if len(parts) % 2 == 0:
            raise Malformed
        plain = [_KEY.sub(r'\1"\2"\3', part) for part in parts[::2]]
        strings = map(quoted, parts[1::2])
        return object_text("".join(part for pair in zip(plain, [*strings, ""], strict=True) for part in pair))

    def forced(self, name: str, parameters: Schema) -> Pieces:
        members = [((f"{key}:", *self._forced(schema)), needed) for key, schema, needed in members_of(parameters)]
        return (f"{self.begin}call:{name}{{", *listed(members, ","), "}" + self.end)

    def _forced(self, schema: Schema) -> Pieces:
        return (self.quote, Until(self.quote)) if is_string(schema) else (Json(schema),)

    def between(self) -> tuple[str, str, str]:
        return "", "", ""


_KEY = re.compile(r"([{,]\s*)([A-Za-z_][\w.-]*)(\s*:)")
