"""The history of a chat in a program: a list of dictionaries in OpenAI's form.

{"role": "user", "content": "…"}
{"role": "assistant", "content": "…", "reasoning_content": "…", "tool_calls": [{"id", "type", "function"}]}
{"role": "tool", "tool_call_id": "…", "content": "…"}
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.chat import ChatInput, ChatMessage

Message = dict[str, Any]


def chat_input(
    messages: Iterable[Message],
    tools: Iterable[Mapping[str, Any]] | None = None,
    template_arguments: Mapping[str, Any] | None = None,
    continue_final: bool = False,
    tool_choice: str = "auto",
    parallel_tools: bool = True,
) -> ChatInput:
    """Raises InvalidRequest for values that JSON does not have."""
    return ChatInput(
        messages=_json("messages", list(messages)),
        tools=_json("tools", list(tools)) if tools else b"",
        arguments=_json("template_arguments", dict(template_arguments)) if template_arguments else b"",
        continue_final=continue_final,
        tool_choice=tool_choice,
        parallel_tools=parallel_tools,
    )


def history(said: str | Iterable[Message], before: Iterable[Message]) -> list[Message]:
    """The messages of the next call: `said` itself, or, if it is a text, `before` and a message of the user."""
    if isinstance(said, str):
        return [*before, {"role": "user", "content": said}]
    messages = list(said)
    if not all(isinstance(message, dict) for message in messages):
        raise InvalidRequest('messages must be dictionaries with "role" and "content"', field="messages")
    return messages


def as_message(answer: ChatMessage) -> Message:
    """The answer as a message of the next call."""
    message: Message = {"role": "assistant", "content": answer.content}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.tool_calls:
        message["content"] = answer.content or None
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in answer.tool_calls
        ]
    return message


def continued(messages: list[Message], said: Message) -> list[Message]:
    """The messages, with the model's text appended to the last one."""
    *before, last = messages
    content = last.get("content")
    if isinstance(content, list):
        more = [*content, {"type": "text", "text": said["content"] or ""}]
        return [*before, {**last, **said, "content": more}]
    return [*before, {**last, **said, "content": (content or "") + (said["content"] or "")}]


def _json(what: str, value: object) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:  # a lone surrogate is a ValueError, too
        raise InvalidRequest(f"{what} cannot be written as JSON: {error}", field=what) from error
