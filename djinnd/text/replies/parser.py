"""Reads a reply while it is generated."""

from __future__ import annotations

from djinnd.text.replies.events import Event
from djinnd.text.replies.format import ReplyFormat
from djinnd.text.replies.output import ReplyEvents, new_id, nine_characters
from djinnd.text.replies.source import Source
from djinnd.text.replies.tools import Tools


class ReplyParser:
    """Takes the text of a reply, with the special tokens that are the format's markers, in pieces of any size, and
    returns its events.

    prompt: the text before the reply; its last characters are enough. Many templates open the reasoning there.
    tools: the functions that the request offers. Without any, text that looks like a call is content.

    Content is never lost or repeated, and the result does not depend on the pieces. White space next to a marker
    belongs to the marker. A call that is malformed becomes content; one that turns malformed inside its arguments ends
    there, and the rest becomes content. The parser keeps source.MAX_HELD characters at the most.
    """

    def __init__(self, form: ReplyFormat, prompt: str, tools: Tools) -> None:
        self._source = Source()
        self._output = ReplyEvents(self._source, nine_characters if form.nine_character_ids else new_id)
        self._reading = form.read(prompt, self._source, self._output, tools)

    def feed(self, text: str) -> list[Event]:
        """Reads the next text and returns the events that are certain now."""
        if not text:
            return []
        self._source.add(text)
        return self._advance()

    def finish(self) -> list[Event]:
        """Ends the reply and returns the remaining events."""
        self._source.end()
        return self._advance()

    def _advance(self) -> list[Event]:
        next(self._reading, None)
        return self._output.drain()
