from __future__ import annotations

import time

from djinnd.text.replies.events import CallArguments, CallBegin, CallEnd, Content, Reasoning
from djinnd.text.replies.output import ReplyEvents
from djinnd.text.replies.source import Source


def output() -> ReplyEvents:
    return ReplyEvents(Source(), lambda: "id")


def test_neighbours_of_one_kind_are_one_event() -> None:
    told = output()
    for part in "ab":
        told.reasoning(part)
    for part in "cd":
        told.content(part)
    for number in range(2):
        told.begin("f")
        for part in ("{", f'"a": {number}', "}"):
            told.arguments(part)
        told.end()
    assert told.drain() == [
        Reasoning("ab"),
        Content("cd"),
        CallBegin(0, "id", "f"),
        CallArguments(0, '{"a": 0}'),
        CallEnd(0, True),
        CallBegin(1, "id", "f"),
        CallArguments(1, '{"a": 1}'),
        CallEnd(1, True),
    ]
    assert told.drain() == []


def test_many_small_parts_take_no_more_than_their_number() -> None:
    """Where each part was joined to those before it, these took ten seconds."""
    told, began = output(), time.monotonic()
    told.begin("f")
    for _ in range(300_000):
        told.arguments("1,")
    (_, arguments) = told.drain()
    assert isinstance(arguments, CallArguments) and len(arguments.text) == 600_000
    assert time.monotonic() - began < 5
