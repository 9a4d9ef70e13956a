"""The fields of OpenAI's bodies that say how tokens are chosen, with vLLM's and ours beside them."""

from __future__ import annotations

from typing import Any

import msgspec

from djinn_client.protocol import Generate, Sampling
from djinnd.gateway.errors import HttpError


class StreamOptions(msgspec.Struct):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False  # we pad nothing


class SamplingFields(msgspec.Struct, kw_only=True):
    """What is null is as if it was not there."""

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

    def sampling(self, choice: int = 0) -> Sampling:
        """Of one of several choices: with a seed, each has its own."""
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_p=1.0 if self.top_p is None else self.top_p,
            top_k=max(self.top_k or 0, 0),  # -1: all, for vLLM
            min_p=self.min_p or 0.0,
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias=self.logit_bias or {},
            min_tokens=self.min_tokens or 0,
            seed=None if self.seed is None else (self.seed + choice) % (1 << 63),  # vLLM takes negative ones
        )

    def generation(self, choice: int = 0, **fields: Any) -> Generate:
        """A Generate without a session. Raises HttpError for what no message can say."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return Generate(
            id=0,
            session="",
            sampling=self.sampling(choice),
            stop=stop,
            stop_token_ids=self.stop_token_ids or [],
            ignore_eos=bool(self.ignore_eos),
            skip_special_tokens=self.skip_special_tokens is not False,
            **fields,
        )


def finish_reason(told: str) -> str:
    """OpenAI's word. Raises HttpError for an output that was ended from outside."""
    if told == "cancelled":
        raise HttpError(499, "somebody ended this request before it was complete", code="cancelled")
    return "length" if told == "length" else "stop"
