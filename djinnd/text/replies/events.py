"""What a reply says, piece by piece."""

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
    """`complete` is False where the reply ended, or stopped being a tool call, inside the arguments."""

    call: int
    complete: bool


Event = Content | Reasoning | CallBegin | CallArguments | CallEnd
