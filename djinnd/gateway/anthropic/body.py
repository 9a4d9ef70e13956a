"""Turns the bodies of Anthropic's Messages API into chats of the daemon. No I/O."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.datastructures import Headers

from djinn_client.protocol import Generate, Sampling
from djinn_client.protocol.fields.bounds import Whole
from djinn_client.protocol.fields.chat import FUNCTION, ChatInput
from djinn_client.protocol.fields.output_format import OutputFormat
from djinnd.gateway.calls.arguments import arguments_text
from djinnd.gateway.calls.conversations import conversation_of
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import encode

# Claude Code begins its system prompt with this line, for Anthropic's accounts. The line has a checksum of the request,
# so that no prompt would begin like the one before.
_BILLING = re.compile(r"^x-anthropic-billing-header:(?: *[\w-]+=[^;\n]*;)*\s*")
_THINKING = {"enabled": True, "disabled": False}  # of other types, the model's template decides
_EFFORTS = {"low": "low", "medium": "medium"}  # all others: high


class Block(msgspec.Struct):
    """One part of a message's content. Each type uses some of these fields."""

    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: Any = None
    tool_use_id: str = ""
    content: str | list[Block] | None = None
    is_error: bool | None = None
    cache_control: Any = None


class Message(msgspec.Struct):
    role: str
    content: str | list[Block]


class Tool(msgspec.Struct):
    name: str
    description: str = ""
    input_schema: dict[str, Any] | None = None
    type: str | None = None
    cache_control: Any = None


class ToolChoice(msgspec.Struct):
    type: str = "auto"
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(msgspec.Struct):
    type: str
    budget_tokens: Whole | None = None


class WantedFormat(msgspec.Struct):
    type: str
    schema: dict[str, Any] | None = None


class OutputConfig(msgspec.Struct):
    effort: str | None = None
    format: WantedFormat | None = None


class ChatFields(msgspec.Struct, kw_only=True):
    """The body of count_tokens, and the common fields of both calls. `cache_control` is accepted everywhere: the daemon
    keeps every prefix that it can."""

    model: str
    messages: list[Message]
    system: str | list[Block] | None = None
    tools: list[Tool] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Any = None

    def chat(self) -> ChatInput:
        """Raises HttpError."""
        messages = [*_system(self.system), *(told for at, each in enumerate(self.messages) for told in _told(at, each))]
        if not messages:
            raise HttpError(400, "messages: at least one message is required", param="messages")
        choice = self.tool_choice or ToolChoice()
        return ChatInput(
            messages=encode(messages),
            tools=encode([_tool(tool) for tool in self.tools]) if self.tools else b"",
            arguments=encode(self._arguments()),
            continue_final=bool(self.messages) and self.messages[-1].role == "assistant",
            tool_choice=_choice(choice),
            parallel_tools=not choice.disable_parallel_tool_use,
        )

    def output_format(self) -> OutputFormat | None:
        """Raises HttpError."""
        wanted = self.output_config.format if self.output_config else None
        if wanted is None:
            return None
        if wanted.type != "json_schema" or wanted.schema is None:
            raise HttpError(400, "output_config.format must be a json_schema, with a schema", param="output_config")
        return OutputFormat("json_schema", encode(wanted.schema).decode(), strict=False)

    def ignored(self) -> list[str]:
        """Fields inside others that have no effect."""
        budget = self.thinking is not None and self.thinking.budget_tokens is not None
        return ["thinking.budget_tokens"] if budget else []

    def _arguments(self) -> dict[str, Any]:
        """Arguments for the model's template. Without `thinking` a model does not think, as in Anthropic's API."""
        thinking = _THINKING.get(self.thinking.type) if self.thinking else False
        arguments: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
        if self.output_config is not None and self.output_config.effort is not None:
            arguments["reasoning_effort"] = _EFFORTS.get(self.output_config.effort, "high")
        return arguments


class MessagesBody(ChatFields, kw_only=True):
    max_tokens: Whole
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    service_tier: str | None = None

    def generation(self, headers: Headers) -> Generate:
        """A call in the conversation that the headers name, or that the daemon finds. Raises HttpError."""
        if self.max_tokens < 1:
            raise HttpError(400, f"max_tokens is {self.max_tokens}; it must be 1 or more", param="max_tokens")
        return Generate(
            id=0,
            conversation=conversation_of(headers, self.model, service_tier=self.service_tier),
            chat=self.chat(),
            max_tokens=self.max_tokens,
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                top_k=max(self.top_k or 0, 0),
            ),
            stop=self.stop_sequences or [],
            format=self.output_format(),
        )


def _system(system: str | list[Block] | None) -> list[dict[str, Any]]:
    """Raises HttpError."""
    blocks = [Block("text", system)] if isinstance(system, str) else system or []
    parts = [_part(f"system.{number}", block)["text"] for number, block in enumerate(blocks)]
    text = "\n".join(filter(None, (_BILLING.sub("", part, count=1) for part in parts)))
    return [{"role": "system", "content": text}] if text else []


def _told(at: int, message: Message) -> list[dict[str, Any]]:
    """Converts a message to OpenAI's form, in which the result of a tool is a message of its own."""
    where = f"messages.{at}"
    blocks = message.content if isinstance(message.content, list) else [Block("text", message.content)]
    if message.role == "user":
        return _of_user(where, blocks)
    if message.role == "assistant":
        return [_of_assistant(where, blocks)]
    # Claude Code takes the system's words into the user's when a refusal has "not supported" and "role system".
    raise HttpError(
        400,
        f"{where}: role {message.role[:40]} is not supported in messages; the top-level `system` parameter takes "
        "instructions",
        param=f"{where}.role",
    )


def _of_user(where: str, blocks: list[Block]) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    for number, block in enumerate(blocks):
        if block.type == "tool_result":
            text = _text(f"{where}.content.{number}", block.content)
            content = f"Error: {text}" if block.is_error else text
            messages.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": content})
        elif messages and messages[-1]["role"] == "user":
            messages[-1]["content"].append(_part(f"{where}.content.{number}", block))
        else:
            messages.append({"role": "user", "content": [_part(f"{where}.content.{number}", block)]})
    return [_plain(message) for message in messages]


def _of_assistant(where: str, blocks: list[Block]) -> dict[str, Any]:
    reasoning, texts, calls = [], [], []
    for number, block in enumerate(blocks):
        if block.type == "thinking":
            reasoning.append(block.thinking)
        elif block.type == "tool_use":
            function = {"name": block.name, "arguments": arguments_text(block.input or {})}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif block.type != "redacted_thinking":  # only Anthropic can read it
            texts.append(_part(f"{where}.content.{number}", block)["text"])
    told: dict[str, Any] = {"role": "assistant", "content": "".join(texts)}
    told |= {"reasoning_content": "".join(reasoning)} if reasoning else {}
    return told | ({"tool_calls": calls} if calls else {})


def _part(where: str, block: Block) -> dict[str, str]:
    if block.type != "text":
        raise HttpError(400, f"{where}: {block.type[:40]!r} cannot be read here: only text", param=where)
    return {"type": "text", "text": block.text}


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """Writes a content of one text as that text: every template takes it."""
    content = message["content"]
    return message | {"content": content[0]["text"]} if isinstance(content, list) and len(content) == 1 else message


def _text(where: str, content: str | list[Block] | None) -> str:
    if isinstance(content, str) or content is None:
        return content or ""
    return "\n".join(_part(f"{where}.content.{number}", block)["text"] for number, block in enumerate(content))


def _tool(tool: Tool) -> dict[str, Any]:
    if tool.input_schema is None or tool.type not in (None, "custom"):
        raise HttpError(
            400,
            f"tools: {tool.name[:64]!r} would have to run on the server, which has no tools of its own",
            param="tools",
        )
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def _choice(choice: ToolChoice) -> str:
    match choice.type:
        case "any":
            return "required"
        case "tool":
            return FUNCTION + choice.name
        case "auto" | "none":
            return choice.type
    raise HttpError(400, f"tool_choice: {choice.type[:40]!r} is none of auto, any, tool, none", param="tool_choice")
