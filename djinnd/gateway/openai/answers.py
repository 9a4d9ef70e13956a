"""The assistant's answer in OpenAI's shape, whole and in parts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from djinn_client.protocol import FinishReason, Generated, Piece
from djinn_client.protocol.fields.chat import ChatMessage, ToolCallDelta


class Function(msgspec.Struct):
    name: str
    arguments: str


class Call(msgspec.Struct):
    id: str
    function: Function
    type: str = "function"


Fields = dict[str, Any]


def answer_of(message: ChatMessage) -> Fields:
    calls = [Call(call.id, Function(call.name, call.arguments)) for call in message.tool_calls]
    answer: Fields = {"role": "assistant", "content": message.content or (None if calls else "")}
    answer |= {"reasoning_content": message.reasoning} if message.reasoning else {}
    return answer | ({"tool_calls": calls} if calls else {})


def finish_reason(told: FinishReason) -> str:
    return "length" if told == "length" else "stop"


def deltas_of(reply: Piece | Generated) -> Iterator[Fields]:
    """The deltas of one reply, in the order of an answer: reasoning, content, calls."""
    if reply.delta is not None and reply.delta.reasoning:
        yield {"reasoning_content": reply.delta.reasoning}
    if reply.text:
        yield {"content": reply.text}
    if reply.delta is not None and reply.delta.tool_calls:
        yield {"tool_calls": [_call_delta(call) for call in reply.delta.tool_calls]}


def _call_delta(call: ToolCallDelta) -> Fields:
    """id, type and name come with the first part of a call only: OpenAI's client joins repeated ones."""
    if not call.id:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = Function(call.name, call.arguments)
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
