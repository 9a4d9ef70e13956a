"""Parses the text of a chat's answer: content, reasoning and tool calls, and the end at a stop string."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn_client.protocol.fields.chat import ChatDelta, ToolCallDelta
from djinnd.text.chat.answer import ChatAnswer
from djinnd.text.reader import ReadingRules
from djinnd.text.replies.events import CallEnd, Content, Event, Reasoning
from djinnd.text.replies.format import ReplyFormat
from djinnd.text.replies.parser import ReplyParser
from djinnd.text.replies.tools import Tools
from djinnd.text.stop_strings import StopMatcher


class ChatReply(ChatAnswer):
    """Reads an answer from text that comes in pieces. Stop strings are looked for in content only; the first complete
    one ends the answer. `prompt`: the end of the text before the answer. `rules`: how the answer's tokens become that
    text, with the format's special tokens in it. `parallel` False: the answer ends with its first call."""

    def __init__(
        self, form: ReplyFormat, prompt: str, tools: Tools, stops: Sequence[str], *, parallel: bool = True
    ) -> None:
        super().__init__()
        self.rules = ReadingRules([], skip_special=form.markers is not None, shown=form.markers or ())
        self.may_end = bool(stops) or not parallel  # at any token
        self._parser = ReplyParser(form, prompt, tools)
        self._matcher = StopMatcher(stops)
        self._parallel = parallel
        self._has_called = False

    @property
    def is_stopped(self) -> bool:
        """True if the answer is over; later text is ignored."""
        return self._matcher.matched is not None or (self._has_called and not self._parallel)

    @property
    def stopped_by(self) -> str:
        """The stop string that ended the answer; "" if none did."""
        return self._matcher.matched or ""

    def feed(self, text: str, may_stop: bool = True) -> str:
        """Reads the next text and returns the content that is certain now. `may_stop` False: no stop string ends with
        this text."""
        return self._hear(self._parser.feed(text), may_stop)

    def finish(self) -> str:
        """Ends the answer and returns the rest of its content."""
        said = self._hear(self._parser.finish(), True)
        rest = self._matcher.finish()
        self.add(rest, None)
        return said + rest

    def _hear(self, events: Iterable[Event], may_stop: bool) -> str:
        content, reasoning, calls = "", "", list[ToolCallDelta]()
        for event in events:
            if self.is_stopped:
                break
            match event:
                case Content(text):
                    content += self._matcher.feed(text) if may_stop else text
                case Reasoning(text):
                    reasoning += text
                case ToolCallDelta():
                    calls.append(event)
                case CallEnd():
                    self._has_called = True
        self.add(content, ChatDelta(reasoning, calls) if reasoning or calls else None)
        return content
