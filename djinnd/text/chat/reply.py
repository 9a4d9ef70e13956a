"""The answer of a chat as it comes: content, reasoning and tool calls, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from djinn_client.chat import ChatDelta, ChatMessage, ToolCall, ToolCallDelta
from djinnd.text.reader import ReadingRules
from djinnd.text.replies import (
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    Event,
    Reasoning,
    ReplyFormat,
    ReplyParser,
    Tools,
)
from djinnd.text.stop_strings import StopMatcher


class ChatReply:
    """Takes the text of an answer in pieces. Stop strings are looked for in content only; nothing counts behind the one
    that is complete first. `prompt`: the end of the text before the answer. `rules`: how the answer's tokens become
    that text, which has the format's special tokens in it. `parallel` False: the answer ends with its first call."""

    def __init__(
        self, form: ReplyFormat, prompt: str, tools: Tools, stops: Sequence[str], *, parallel: bool = True
    ) -> None:
        self.rules = ReadingRules([], skip_special=form.markers is not None, shown=form.markers or ())
        self._parser = ReplyParser(form, prompt, tools)
        self._matcher = StopMatcher(stops)
        self.may_end = bool(stops) or not parallel  # at any token
        self._parallel = parallel
        self._has_called = False
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}
        self._new_reasoning = ""
        self._new_calls: list[ToolCallDelta] = []

    @property
    def is_stopped(self) -> bool:
        """The answer is over, whatever the model goes on with."""
        return self._matcher.matched is not None or (self._has_called and not self._parallel)

    @property
    def stopped_by(self) -> str:
        """The stop string that ended the answer; "" where none did."""
        return self._matcher.matched or ""

    @property
    def has_delta(self) -> bool:
        return bool(self._new_reasoning or self._new_calls)

    def feed(self, text: str, may_stop: bool = True) -> str:
        """The content that this makes certain. `may_stop` False: no stop string ends with this text."""
        return self._hear(self._parser.feed(text), may_stop)

    def finish(self) -> str:
        """The content that is left when no text follows."""
        said = self._hear(self._parser.finish(), True)
        rest = self._matcher.finish()
        self._content.append(rest)
        return said + rest

    def take_delta(self) -> ChatDelta | None:
        """What has come beside content since this was last called."""
        if not self.has_delta:
            return None
        delta = ChatDelta(self._new_reasoning, self._new_calls)
        self._new_reasoning, self._new_calls = "", []
        return delta

    @property
    def message(self) -> ChatMessage:
        """All that has come."""
        calls = [ToolCall(call.id, call.name, "".join(call.arguments)) for call in self._calls.values()]
        return ChatMessage("".join(self._content), "".join(self._reasoning), calls)

    def _hear(self, events: Iterable[Event], may_stop: bool) -> str:
        told = ""
        for event in events:
            if self.is_stopped:
                break
            match event:
                case Content(text):
                    told += self._matcher.feed(text) if may_stop else text
                case Reasoning(text):
                    self._reasoning.append(text)
                    self._new_reasoning += text
                case CallBegin(index, id_, name):
                    self._calls[index] = _Call(id_, name)
                    self._new_calls.append(ToolCallDelta(index, id_, name))
                case CallArguments(index, text):
                    self._calls[index].arguments.append(text)
                    self._new_calls.append(ToolCallDelta(index, arguments=text))
                case CallEnd():
                    self._has_called = True
        if told:
            self._content.append(told)
        return told


class _Call:
    def __init__(self, id: str, name: str) -> None:
        self.id = id
        self.name = name
        self.arguments: list[str] = []
