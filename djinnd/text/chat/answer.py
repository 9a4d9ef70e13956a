"""The answer of a chat so far, and its parts that no piece has sent yet."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from djinn_client.protocol.fields.chat import ChatDelta, ChatMessage, ToolCall, ToolCallDelta


class ChatAnswer:
    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[ToolCallDelta] = []  # the parts of all calls, in order
        self._taken = 0, 0  # parts of the reasoning and of the calls that `take_delta` has returned

    def add(self, content: str, delta: ChatDelta | None) -> None:
        """The next part. The caller gets its content as text."""
        if content:
            self._content.append(content)
        if delta is not None:
            self._reasoning += [delta.reasoning] if delta.reasoning else []
            self._calls += _joined(delta.tool_calls)

    @property
    def has_delta(self) -> bool:
        return self._taken != (len(self._reasoning), len(self._calls))

    def take_delta(self) -> ChatDelta | None:
        """Returns the reasoning and calls that came since the last call of this."""
        if not self.has_delta:
            return None
        reasoning, calls = self._taken
        self._taken = len(self._reasoning), len(self._calls)
        return ChatDelta("".join(self._reasoning[reasoning:]), _joined(self._calls[calls:]))

    @property
    def message(self) -> ChatMessage:
        """The whole answer so far."""
        calls = [ToolCall(call.id, call.name, call.arguments) for call in _joined(self._calls)]
        return ChatMessage("".join(self._content), "".join(self._reasoning), calls)


def _joined(parts: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    """One part for each call: a call's parts follow one another."""
    joined = []
    for index, group in groupby(parts, lambda part: part.index):
        first, *rest = group
        joined.append(ToolCallDelta(index, first.id, first.name, "".join(part.arguments for part in (first, *rest))))
    return joined
