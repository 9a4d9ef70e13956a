"""The parts of a reply in order: reasoning, content and tool calls."""

from __future__ import annotations

from typing import NamedTuple


class Content(NamedTuple):
    text: str


class Reasoning(NamedTuple):
    text: str


class CallBegin(NamedTuple):
    """A tool call begins. `call` counts the calls of a reply from 0."""

    call: int
    id: str
    name: str


class CallArguments(NamedTuple):
    """The next characters of the call's arguments, which are the text of one JSON object."""

    call: int
    text: str


class CallEnd(NamedTuple):
    """The end of a call. `complete` is False if the reply ended inside the arguments, or the call was malformed."""

    call: int
    complete: bool


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd
