"""Chats on the wire: the messages that a call brings, and the model's answer.

Messages, tools and template arguments travel as JSON texts. Only the code that renders the model's chat template looks
into them, and for a model that no administrator has configured this is the user's text worker.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from djinn_client.protocol.fields.bounds import Name

JsonText = Annotated[bytes, msgspec.Meta(max_length=16 << 20)]  # UTF-8
ToolsText = Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
FUNCTION = "function:"  # in a tool_choice, stands before the name of the one function to call


class ChatInput(msgspec.Struct, frozen=True, omit_defaults=True):
    """The whole conversation. The daemon computes those of its tokens that the session does not have.

    messages        [{"role": system | developer | user | assistant | tool, "content": text | null | [{"type": "text",
                    "text": …}]}, …]; a message of the assistant may have `reasoning_content` and `tool_calls`:
                    [{"id", "type": "function", "function": {"name", "arguments": JSON text}}]; one of a tool has
                    `tool_call_id` and may have `name`
    tools           [{"type": "function", "function": {"name", "description", "parameters": JSON schema}}, …]
    arguments       further values for the template: {"enable_thinking": false, …}
    continue_final  the answer continues the text of the last message instead of beginning a message
    tool_choice     auto; none; required; or FUNCTION and a name
    parallel_tools  an answer may have several calls
    """

    messages: JsonText
    tools: ToolsText = b""
    arguments: JsonText = b""
    continue_final: bool = False
    tool_choice: Name = "auto"
    parallel_tools: bool = True


class ToolCall(msgspec.Struct, frozen=True):
    """A function call that the model asks for. `arguments` is the model's text: JSON, unless the model erred."""

    id: str
    name: str
    arguments: str


class ChatMessage(msgspec.Struct, frozen=True, omit_defaults=True):
    """The model's answer, read from its text by the rules of its family."""

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = []


class ToolCallDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """A further part of the call with this index. Only the first part has `id` and `name`."""

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class ChatDelta(msgspec.Struct, frozen=True, omit_defaults=True):
    """The reasoning and tool calls of a piece, with one part for each call. Its content is the piece's text."""

    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []
