"""The assistant's answer in OpenAI's shape, whole and in parts."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from djinn_client.protocol import FinishReason, Generated, Piece
from djinn_client.protocol.fields.chat import ChatMessage, ToolCallDelta

UNSET = msgspec.UNSET
Unset = msgspec.UnsetType


class Function(msgspec.Struct, omit_defaults=True):
    name: str | Unset = UNSET
    arguments: str | Unset = UNSET


class Call(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: Function


class CallDelta(msgspec.Struct, kw_only=True):
    index: int
    id: str | Unset = UNSET
    type: str | Unset = UNSET
    function: Function


class Answer(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    reasoning_content: str | Unset = UNSET
    tool_calls: list[Call] | Unset = UNSET


class Delta(msgspec.Struct, kw_only=True):
    role: str | Unset = UNSET
    content: str | Unset = UNSET
    reasoning_content: str | Unset = UNSET
    tool_calls: list[CallDelta] | Unset = UNSET


def answer_of(message: ChatMessage) -> Answer:
    calls = [Call(id=call.id, function=Function(call.name, call.arguments)) for call in message.tool_calls]
    return Answer(
        content=message.content or (None if calls else ""),
        reasoning_content=message.reasoning or UNSET,
        tool_calls=calls or UNSET,
    )


def finish_reason(told: FinishReason) -> str:
    return "length" if told == "length" else "stop"


def deltas_of(reply: Piece | Generated) -> Iterator[Delta]:
    """The deltas of one reply, in the order of an answer: reasoning, content, calls."""
    if reply.delta is not None and reply.delta.reasoning:
        yield Delta(reasoning_content=reply.delta.reasoning)
    if reply.text:
        yield Delta(content=reply.text)
    if reply.delta is not None and reply.delta.tool_calls:
        yield Delta(tool_calls=[_call_delta(call) for call in reply.delta.tool_calls])


def _call_delta(call: ToolCallDelta) -> CallDelta:
    """id, type and name come with the first part of a call only: OpenAI's client joins repeated ones."""
    if not call.id:
        return CallDelta(index=call.index, function=Function(arguments=call.arguments))
    return CallDelta(index=call.index, id=call.id, type="function", function=Function(call.name, call.arguments))
