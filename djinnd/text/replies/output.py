"""Collects the events of a reply, in the order in which its readers tell them."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable

from djinn_client.protocol.fields.chat import ToolCallDelta
from djinnd.text.replies.events import CallEnd, Content, Event, Reasoning
from djinnd.text.replies.source import Source


def new_id() -> str:
    return "call_" + secrets.token_hex(12)


def nine_characters() -> str:
    """Mistral's templates refuse ids of other lengths."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


class ReplyEvents:
    def __init__(self, source: Source, make_id: Callable[[], str]) -> None:
        self._source = source
        self._make_id = make_id
        self._events: list[Event] = []
        self._calls = 0
        self._in_call = False

    def drain(self) -> list[Event]:
        """Returns the events since the last call of this."""
        events, self._events = self._events, []
        return events

    def content(self, text: str) -> None:
        if text:
            self._append(Content(text))

    def reasoning(self, text: str) -> None:
        if text:
            self._append(Reasoning(text))

    def begin(self, name: str, call_id: str = "") -> None:
        assert not self._in_call
        self._in_call = True
        self._append(ToolCallDelta(self._calls, call_id or self._make_id(), name))

    def arguments(self, text: str) -> None:
        assert self._in_call
        if text:
            self._append(ToolCallDelta(self._calls, arguments=text))

    def end(self) -> None:
        self._append(CallEnd(self._calls))
        self._in_call = False
        self._calls += 1

    def call(self, name: str, arguments: str) -> None:
        """A whole call at once."""
        self.begin(name)
        self.arguments(arguments)
        self.end()

    def give_up(self) -> None:
        """Ends an attempt to read a tool call: the text that is held becomes content."""
        held = self._source.held()
        if self._in_call:
            self.end()
        self.content(held)
        self._source.told()

    def _append(self, event: Event) -> None:
        self._source.told()
        self._events.append(event)
