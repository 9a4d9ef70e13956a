"""The fields of OpenAI's bodies that say how tokens are chosen, with vLLM's and ours beside them."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from starlette.datastructures import Headers

from djinn_client.protocol import Generate, Sampling
from djinn_client.protocol.fields.conversations import Conversation
from djinn_client.protocol.fields.output_format import OutputFormat, output_format
from djinnd.gateway.calls.conversations import conversation_of
from djinnd.gateway.http.errors import HttpError


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class StructuredOutputs(msgspec.Struct):
    """vLLM's: one of these."""

    json: dict[str, Any] | str | None = None  # a schema
    regex: str | None = None
    grammar: str | None = None
    json_object: bool | None = None
    choice: list[str] | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """A field that is null counts as missing."""

    model: str
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: dict[str, Any] | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    session_id: str | None = None
    priority: int | str | None = None
    regex: str | None = None  # ours, as is the next: the whole output is one of these
    grammar: str | None = None  # Lark
    structured_outputs: StructuredOutputs | None = None
    between_tokens_s: float | None = None  # ours, as is the next: targets of this request
    first_token_s: float | None = None
    top_k: int | None = None  # from here on not OpenAI's, but vLLM's
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None

    @property
    def outputs(self) -> int:
        """Raises HttpError."""
        if self.n is not None and self.n < 1:
            raise HttpError(400, f"n is {self.n}; it must be 1 or more", param="n")
        return self.n or 1

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def ignored(self) -> list[str]:
        """Fields inside others that have no effect."""
        options = self.stream_options or StreamOptions()
        names = ("continuous_usage_stats", "include_obfuscation")
        return [f"stream_options.{name}" for name in names if getattr(options, name)]

    def sampling(self, choice: int = 0) -> Sampling:
        """`choice`: the index of the output. With a seed, each output has a seed of its own."""
        given = {name: value for name in Sampling.__struct_fields__ if (value := getattr(self, name)) is not None}
        given |= {"top_k": max(self.top_k or 0, 0)}  # -1: all, for vLLM
        if self.seed is not None:
            given["seed"] = (self.seed + choice) % (1 << 63)  # vLLM takes negative ones
        return Sampling(**{"temperature": 1.0} | given)

    def generation(self, choice: int = 0, **fields: Any) -> Generate:
        """A Generate without a session. Raises HttpError."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Generate(
            id=0,
            session="",
            sampling=self.sampling(choice),
            stop=stop,
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            format=self.output_format(),
            between_tokens_s=self.between_tokens_s,
            first_token_s=self.first_token_s,
            **fields,
        )

    def output_format(self) -> OutputFormat | None:
        """None: free text. Raises InvalidRequest, HttpError."""
        if self.structured_outputs is not None:
            if self.response_format or self.regex or self.grammar:
                raise HttpError(400, "an output has one format", param="structured_outputs")
            return _structured(self.structured_outputs)
        wanted = None if self.response_format == {"type": "text"} else self.response_format
        return output_format(wanted, self.regex, self.grammar)

    def conversation(self, headers: Headers) -> Conversation:
        """Raises HttpError."""
        key = self.prompt_cache_key or self.session_id
        return conversation_of(headers, self.model, key=key, service_tier=self.service_tier, priority=self.priority)


def _structured(wanted: StructuredOutputs) -> OutputFormat | None:
    """Raises InvalidRequest, HttpError."""
    if wanted.choice is not None:
        return OutputFormat("regex", "|".join(f"({re.escape(each)})" for each in wanted.choice))
    if wanted.json is not None:
        schema = wanted.json if isinstance(wanted.json, str) else msgspec.json.encode(wanted.json).decode()
        return OutputFormat("json_schema", schema, strict=False)
    if wanted.json_object:
        return OutputFormat("json_object")
    return output_format(None, wanted.regex, wanted.grammar)
