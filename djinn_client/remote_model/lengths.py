"""How many tokens a call of `generate` may and must add, by transformers' rules."""

from __future__ import annotations

from typing import Any, NamedTuple

from djinn_client.errors import InvalidRequest


class NewTokens(NamedTuple):
    most: int
    least: int


def new_tokens(config: Any, prompt: int, context: int | None, is_length_given: bool) -> NewTokens:
    """`config` is a GenerationConfig with all defaults, and `prompt` the length of the prompts with their padding.
    `context` is the model's longest sequence; it bounds only the default. Raises InvalidRequest."""
    if config.max_new_tokens is not None:
        most = config.max_new_tokens
    elif is_length_given:
        most = config.max_length - prompt
    else:
        most = min(config.max_length, config.max_length if context is None else context - prompt)
    if most <= 0:
        raise InvalidRequest(
            f"the prompt has {prompt:,} tokens, and max_length is {config.max_length:,}: give max_new_tokens",
            field="max_length",
        )
    least = config.min_new_tokens
    if least is None:
        least = max((config.min_length or 0) - prompt, 0)
    return NewTokens(most, min(least, most))
