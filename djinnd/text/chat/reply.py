"""The answer of a chat as it comes: content, reasoning and tool calls, and where a stop string ends it."""

from __future__ import annotations

from collections.abc import Sequence

from djinn_client.chat import ChatDelta, ChatMessage, ToolCall, ToolCallDelta
from djinnd.text.stop_strings import StopMatcher


class ChatReply:
    """Takes the text of an answer in pieces. Stop strings are looked for in content only; no text counts behind the one
    that is complete first."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._matcher = StopMatcher(stops)
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[_Call] = []
        self._new_reasoning = ""
        self._new_calls: list[ToolCallDelta] = []

    @property
    def is_stopped(self) -> bool:
        return self._matcher.matched is not None

    @property
    def has_delta(self) -> bool:
        return bool(self._new_reasoning or self._new_calls)

    def feed(self, text: str) -> str:
        """The content that this makes certain."""
        return self._said(self._matcher.feed(text))

    def finish(self) -> str:
        """The content that is left when no text follows."""
        return self._said(self._matcher.finish())

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
        calls = [ToolCall(call.id, call.name, "".join(call.arguments)) for call in self._calls]
        return ChatMessage("".join(self._content), "".join(self._reasoning), calls)

    def _said(self, content: str) -> str:
        if content:
            self._content.append(content)
        return content


class _Call:
    def __init__(self, id: str, name: str) -> None:
        self.id = id
        self.name = name
        self.arguments: list[str] = []
