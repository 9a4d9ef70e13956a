"""Collects the events of a reply, in the order in which its readers tell them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable
from itertools import groupby

from djinnd.text.replies.events import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from djinnd.text.replies.source import Source

NewId = Callable[[], str]


def new_id() -> str:
    return "call_" + secrets.token_hex(12)


def nine_characters() -> str:
    """Mistral's templates refuse ids of other lengths."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ReplyEvents:
    def __init__(self, source: Source, make_id: NewId) -> None:
        self._source = source
        self._make_id = make_id
        self._events: list[Event] = []
        self._calls = 0
        self._in_call = False

    def drain(self) -> list[Event]:
        """Returns the events since the last call of this. Readers tell a text in many small parts, which are joined
        here once."""
        events, self._events = self._events, []
        if len(events) < 2:
            return events
        return [_joined([*group]) for _, group in groupby(events, _kind)]

    def content(self, text: str) -> None:
        if text:
            self._append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._append(Reasoning(text))

    def begin(self, name: str, call_id: str = "") -> None:
        assert not self._in_call
        self._in_call = True
        self._append(CallBegin(self._calls, call_id or self._make_id(), name))

    def arguments(self, text: str) -> None:
        assert self._in_call
        if text:
            self._append(CallArguments(self._calls, text))

    def end(self, complete: bool = True) -> None:
        self._append(CallEnd(self._calls, complete))
        self._in_call = False
        self._calls += 1

    def call(self, name: str, arguments: str, call_id: str = "") -> None:
        """A whole call at once."""
        self.begin(name, call_id)
        self.arguments(arguments)
        self.end()

    def give_up(self) -> None:
        """Ends an attempt to read a tool call: the text that is held becomes content."""
        held = self._source.held()
        if self._in_call:
            self.end(complete=False)
        self.content(held)
        self._source.told()

    def _append(self, event: Event) -> None:
        self._source.told()
        self._events.append(event)


def _kind(event: Event) -> object:
    """Neighbouring events of one kind are joined. Each begin and end of a call has a kind of its own."""
    match event:
        case Content() | Reasoning():
            return type(event)
        case CallArguments(call):
            return call
        case _:
            return event


def _joined(events: list[Event]) -> Event:
    """Joins neighbouring events of one kind."""
    first = events[0]
    if isinstance(first, CallBegin | CallEnd) or len(events) == 1:
        return first
    return first._replace(text="".join(event.text for event in events if not isinstance(event, CallBegin | CallEnd)))
