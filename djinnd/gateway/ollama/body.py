"""Turns the bodies of Ollama's API into requests of the daemon. No I/O."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from djinn_client.protocol import Embed, Generate, Sampling
from djinn_client.protocol.fields.bounds import Whole
from djinn_client.protocol.fields.chat import ChatInput
from djinn_client.protocol.fields.output_format import OutputFormat
from djinnd.gateway.calls.arguments import arguments_text
from djinnd.gateway.http.errors import HttpError
from djinnd.gateway.http.replies import encode

TAG = ":latest"  # clients put it behind each name
_EFFORTS = ("low", "medium", "high")


class Options(msgspec.Struct):
    """Ollama's defaults; a penalty for repetition is off unless it is asked for."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: Whole | None = None
    num_predict: Whole | None = None
    stop: str | list[str] | None = None

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=_or(self.temperature, 0.8),
            top_p=_or(self.top_p, 0.9),
            top_k=max(0, int(_or(self.top_k, 40))),
            min_p=_or(self.min_p, 0.0),
            repetition_penalty=_or(self.repeat_penalty, 1.0),
            presence_penalty=_or(self.presence_penalty, 0.0),
            frequency_penalty=_or(self.frequency_penalty, 0.0),
            seed=None if self.seed is None or self.seed < 0 else self.seed,
        )

    @property
    def most_tokens(self) -> int | None:
        """None, as Ollama's -1 and -2: to the end of the context."""
        return None if self.num_predict is None or self.num_predict < 0 else self.num_predict


_OPTIONS = frozenset(Options.__struct_fields__)


class CallFunction(msgspec.Struct):
    name: str
    arguments: dict[str, Any] | str = {}


class Call(msgspec.Struct):
    function: CallFunction
    id: str = ""


class Message(msgspec.Struct):
    role: str
    content: str | None = None
    thinking: str | None = None
    images: list[Any] | None = None
    tool_calls: list[Call] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class CommonFields(msgspec.Struct, kw_only=True):
    model: str
    stream: bool | None = None
    format: str | dict[str, Any] | None = None
    options: dict[str, Any] | None = None
    think: bool | str | None = None
    keep_alive: float | str | None = None

    @property
    def unloads(self) -> bool:
        """True for a lifetime of 0. Without a prompt it asks to unload the model: `ollama stop` sends it."""
        return (
            self.keep_alive is not None and re.fullmatch(r"[-+]?0+(\.0*)?(ms|s|m|h)?", str(self.keep_alive)) is not None
        )

    @property
    def model_name(self) -> str:
        return self.model.removesuffix(TAG)

    def read_options(self) -> Options:
        """Raises HttpError."""
        try:
            return msgspec.convert(self.options or {}, Options)
        except msgspec.ValidationError as error:
            raise HttpError(400, f"options: {error}", param="options") from error

    def ignored(self) -> Iterator[str]:
        """Fields of a call with a prompt that have no effect."""
        if self.keep_alive is not None:
            yield "keep_alive"
        yield from (f"options.{name}" for name in self.options or {} if name not in _OPTIONS)

    def generation(self, **prompt: Any) -> Generate:
        """Raises HttpError."""
        options = self.read_options()
        return Generate(
            id=0,
            max_tokens=options.most_tokens,
            sampling=options.sampling(),
            stop=[options.stop] if isinstance(options.stop, str) else options.stop or [],
            format=_output_format(self.format),
            **prompt,
        )

    def template_arguments(self) -> bytes:
        """Without `think` the model's template decides."""
        if self.think is None:
            return b""
        arguments: dict[str, Any] = {"enable_thinking": self.think is not False}
        if self.think in _EFFORTS:
            arguments["reasoning_effort"] = self.think
        return encode(arguments)


class ChatBody(CommonFields, kw_only=True):
    messages: list[Message] = []
    tools: list[dict[str, Any]] | None = None

    def chat(self) -> ChatInput:
        """Raises HttpError."""
        calls, results = _ids(), _ids()
        messages = [_told(at, message, calls, results) for at, message in enumerate(self.messages)]
        return ChatInput(
            messages=encode(messages),
            tools=encode(self.tools) if self.tools else b"",
            arguments=self.template_arguments(),
            continue_final=self.messages[-1].role == "assistant" and not self.messages[-1].tool_calls,
        )


class GenerateBody(CommonFields, kw_only=True):
    prompt: str = ""
    system: str = ""
    suffix: str | None = None
    raw: bool | None = None
    images: list[Any] | None = None

    def expect_possible(self) -> None:
        """Raises HttpError."""
        if self.suffix:
            raise HttpError(400, "suffix is not supported: no model here fills in the middle by itself", param="suffix")
        _expect_no_images("images", self.images)

    def chat(self) -> ChatInput:
        system = [{"role": "system", "content": self.system}] if self.system else []
        messages = [*system, {"role": "user", "content": self.prompt}]
        return ChatInput(messages=encode(messages), arguments=self.template_arguments())


class EmbedBody(msgspec.Struct, kw_only=True):
    model: str
    input: str | list[str]
    truncate: bool | None = None
    dimensions: int | None = None

    def wanted(self) -> Embed:
        """Raises HttpError."""
        if self.dimensions is not None:
            raise HttpError(400, "dimensions is not supported: a vector has the model's width", param="dimensions")
        texts = [self.input] if isinstance(self.input, str) else self.input
        return Embed(id=0, model=self.model.removesuffix(TAG), texts=texts)

    def ignored(self) -> list[str]:
        """A text that is too long is refused, and never cut."""
        return ["truncate"] if self.truncate else []


def _ids() -> Iterator[str]:
    """Ollama's messages name a call by its place only, and templates want ids."""
    return (f"call{number:05}" for number in itertools.count(1))


def _told(at: int, message: Message, calls: Iterator[str], results: Iterator[str]) -> dict[str, Any]:
    """Converts a message to OpenAI's form. `calls` and `results`: ids of the next calls, and of the next results."""
    _expect_no_images(f"messages.{at}.images", message.images)
    told: dict[str, Any] = {"role": message.role, "content": message.content or ""}
    if message.thinking:
        told["reasoning_content"] = message.thinking
    if message.tool_calls:
        told["tool_calls"] = [
            {
                "id": call.id or new_id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call, new_id in zip(message.tool_calls, calls, strict=False)
        ]
    if message.role == "tool":
        new_id = next(results)
        told["tool_call_id"] = message.tool_call_id or new_id
        if message.tool_name:
            told["name"] = message.tool_name
    return told


def _arguments(arguments: dict[str, Any] | str) -> str:
    return arguments if isinstance(arguments, str) else arguments_text(arguments)


def _output_format(wanted: str | dict[str, Any] | None) -> OutputFormat | None:
    """Raises HttpError."""
    if not wanted:
        return None
    if isinstance(wanted, dict):
        return OutputFormat("json_schema", encode(wanted).decode(), strict=False)
    if wanted != "json":
        raise HttpError(400, f'format must be "json" or a JSON schema, and not {wanted[:40]!r}', param="format")
    return OutputFormat("json_object")


def _expect_no_images(where: str, images: list[Any] | None) -> None:
    if images:
        raise HttpError(400, f"{where}: images cannot be read here: only text", param=where)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
