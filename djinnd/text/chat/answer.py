"""The answer of a chat so far, and its parts that no piece has sent yet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from djinn_client.protocol.fields.chat import ChatDelta, ChatMessage, ToolCall, ToolCallDelta


class ChatAnswer:
    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _Call] = {}  # by index
        self._new_reasoning: list[str] = []
        self._new_calls: list[ToolCallDelta] = []

    def add(self, content: str, delta: ChatDelta | None) -> None:
        """The next part. The caller gets its content as text."""
        if content:
            self._content.append(content)
        if delta is None:
            return
        if delta.reasoning:
            self._reasoning.append(delta.reasoning)
            self._new_reasoning.append(delta.reasoning)
        for part in delta.tool_calls:
            call = self._calls.setdefault(part.index, _Call(part.id, part.name))
            call.arguments.append(part.arguments)
            self._new_calls.append(part)

    @property
    def has_delta(self) -> bool:
        return bool(self._new_reasoning or self._new_calls)

    def take_delta(self) -> ChatDelta | None:
        """Returns the reasoning and calls that came since the last call of this."""
        if not self.has_delta:
            return None
        delta = ChatDelta("".join(self._new_reasoning), _joined(self._new_calls))
        self._new_reasoning, self._new_calls = [], []
        return delta

    @property
    def message(self) -> ChatMessage:
        """The whole answer so far."""
        calls = [ToolCall(call.id, call.name, "".join(call.arguments)) for call in self._calls.values()]
        return ChatMessage("".join(self._content), "".join(self._reasoning), calls)


class _Call:
    def __init__(self, id: str, name: str) -> None:
        self.id = id
        self.name = name
        self.arguments: list[str] = []


def _joined(parts: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """One part for neighbours of the same call."""
    joined = []
    for index, group in groupby(parts, lambda part: part.index):
        first, *rest = group
        arguments = "".join(part.arguments for part in (first, *rest))
        joined.append(ToolCallDelta(index, first.id, first.name, arguments))
    return joined
