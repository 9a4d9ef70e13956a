"""Counts the tokens of a request, in OpenAI's fields."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from djinn_client.protocol import Usage


class PromptDetails(msgspec.Struct):
    cached_tokens: int


class UsageFields(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails


def usage_of(usages: Sequence[Usage], outputs: int) -> UsageFields:
    """Sums up a request's outputs. `outputs`: how many each prompt has; the prompt itself counts once."""
    prompt = sum(usage.prompt_tokens for usage in usages) // outputs
    generated = sum(usage.generated_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages) // outputs
    return UsageFields(prompt, generated, prompt + generated, PromptDetails(min(cached, prompt)))
