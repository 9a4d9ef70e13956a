"""Messages of a chat as they travel: what a call brings, and what the model has answered.

Messages, tools and template arguments travel as JSON texts: no part of the daemon but the model's chat template needs
to look into them, and a template of a model that nobody has configured runs in its user's text worker only.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from djinn_client.bounds import Name

JsonText = Annotated[bytes, msgspec.Meta(max_length=16 << 20)]  # UTF-8
ToolsText = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
FUNCTION = "function:"  # before the name of the one function that a tool_choice names


class ChatInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole conversation; the daemon computes what the session does not have of it.

    messages        [{"role": system | developer | user | assistant | tool, "content": text | null | [{"type": "text",
                    "text": …}]}, …]; a message of the assistant may have `reasoning_content` and `tool_calls`:
                    [{"id", "type": "function", "function": {"name", "arguments": JSON text}}]; one of a tool has
                    `tool_call_id` and may have `name`
    tools           [{"type": "function", "function": {"name", "description", "parameters": JSON schema}}, …]
    arguments       what the template takes beside: {"enable_thinking": false, …}
    continue_final  the answer goes on with the last message's text, in the place of a message of its own
    tool_choice     auto; none; required; or FUNCTION and a name
    parallel_tools  several calls in one answer are allowed
    """

    messages: JsonText
    tools: ToolsText = b""
    arguments: JsonText = b""
    continue_final: bool = False
    tool_choice: Name = "auto"
    parallel_tools: bool = True


class ToolCall(msgspec.Struct, frozen=True):
    """A call that the model wants. `arguments` is the text that it wrote, JSON unless the model erred."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The model's answer, read from its text by the rules of its family."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A further part of the call with this index. `id` and `name` are in its first part only."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a piece brings beside content, which is the piece's text."""

    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
