"""Counts the tokens of a request, in OpenAI's fields."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from djinn_client.protocol import Usage


def usage_of(usages: Sequence[Usage], outputs: int) -> dict[str, Any]:
    """Sums up a request's outputs. `outputs`: how many each prompt has; the prompt itself counts once."""
    prompt = sum(usage.prompt_tokens for usage in usages) // outputs
    generated = sum(usage.generated_tokens for usage in usages)
    cached = sum(usage.cached_tokens for usage in usages) // outputs
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": min(cached, prompt)},
    }
