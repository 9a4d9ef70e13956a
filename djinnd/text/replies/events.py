"""The parts of a reply in order: reasoning, content and tool calls."""

from __future__ import annotations

from typing import NamedTuple

from djinn_client.protocol.fields.chat import ToolCallDelta


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallEnd(NamedTuple):
    """A tool call is over: its arguments are complete, or the reply ended inside them, or they were malformed."""

    call: int


Event = Content | Reasoning | ToolCallDelta | CallEnd
