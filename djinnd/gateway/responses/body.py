"""Turns the body of OpenAI's Responses API into a request of the daemon. No I/O."""

from __future__ import annotations

from typing import Any

import msgspec

from djinn_client.protocol import Generate, Sampling
from djinn_client.protocol.fields.chat import FUNCTION, ChatInput
from djinn_client.protocol.fields.conversations import Conversation
from djinn_client.protocol.fields.output_format import output_format
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import encode
from djinnd.gateway.responses.items import Message, Messages


class Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class TextFormat(msgspec.Struct):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ConversationId(msgspec.Struct):
    id: str


class Body(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[dict[str, Any]] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    conversation: str | ConversationId | None = None
    store: bool | None = None
    stream: bool | None = None
    background: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None  # ours, as is the next
    stop: str | list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: Reasoning | None = None
    text: TextFormat | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    priority: int | str | None = None
    prompt: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None  # vLLM's

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def conversation_id(self) -> str:
        """ "": none."""
        named = self.conversation
        return named.id if isinstance(named, ConversationId) else named or ""

    def functions(self) -> list[dict[str, Any]]:
        """Tools that the model may call, as templates know them."""
        functions = [tool for tool in self.tools or [] if tool.get("type") == "function"]
        return [
            {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}
            for tool in functions
        ]

    def ignored(self) -> set[str]:
        """Fields that are known and have no effect here. Tools that OpenAI's servers would run are left out: the model
        cannot call them."""
        hosted = {f"tools.{str(tool.get('type'))[:32]}" for tool in self.tools or [] if tool.get("type") != "function"}
        if self.reasoning is not None and self.reasoning.summary is not None:
            hosted.add("reasoning.summary")
        if self.text is not None and self.text.verbosity is not None:
            hosted.add("text.verbosity")
        return hosted

    def expect_supported(self) -> None:
        """Raises HttpError for fields without which the answer would be another one."""
        if self.background:
            raise HttpError(400, "responses are not made in the background: use stream", param="background")
        if self.prompt is not None:
            raise HttpError(400, "no prompts are stored here: send the input", param="prompt")
        if self.truncation not in (None, "disabled"):
            told = "a conversation that is too long is refused, and not truncated"
            raise HttpError(400, told, param="truncation")
        if self.previous_response_id and self.conversation_id:
            raise HttpError(400, "give previous_response_id or conversation, not both", param="conversation")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            told = f"max_output_tokens is {self.max_output_tokens}; it must be 1 or more"
            raise HttpError(400, told, param="max_output_tokens")

    def generation(self, messages: Messages, conversation: Conversation) -> Generate:
        """The answer to these messages. Raises HttpError, InvalidRequest."""
        system = [Message(role="system", content=self.instructions)] if self.instructions else []
        functions, arguments = self.functions(), dict(self.chat_template_kwargs or {})
        if self.reasoning is not None and self.reasoning.effort is not None:
            arguments["reasoning_effort"] = self.reasoning.effort
        return Generate(
            id=0,
            conversation=conversation,
            chat=ChatInput(
                messages=encode([*system, *messages]),
                tools=encode(functions) if functions else b"",
                arguments=encode(arguments) if arguments else b"",
                tool_choice=self._tool_choice(),
                parallel_tools=self.parallel_tool_calls is not False,
            ),
            max_tokens=self.max_output_tokens,
            sampling=Sampling(
                temperature=1.0 if self.temperature is None else self.temperature,
                top_p=1.0 if self.top_p is None else self.top_p,
                seed=self.seed,
            ),
            stop=[self.stop] if isinstance(self.stop, str) else self.stop or [],
            format=output_format(None if self.text is None else self.text.format),
        )

    def _tool_choice(self) -> str:
        """Raises HttpError."""
        choice = self.tool_choice
        if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("name"), str):
            return f"{FUNCTION}{choice['name']}"
        if choice in (None, "auto", "none", "required"):
            return str(choice or "auto")
        raise HttpError(400, "tool_choice must be auto, none, required, or name a function", param="tool_choice")
