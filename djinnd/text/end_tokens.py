"""Finds the tokens that end an output, which checkpoints name in several places and forms."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Settings = Mapping[str, Any]

MAX_DIGITS = 10
MAX_END_TOKENS = 256  # of a model: each call sends them to the engine


def end_tokens(
    generation_config: Settings, config: Settings, tokenizer_config: Settings, id_of: Callable[[str], int | None]
) -> frozenset[int]:
    """The ids from the first of these places that names any: `eos_token_id` of the generation configuration, then of
    the model's, then the text `eos_token` of the tokenizer's, which `id_of` looks up. So an empty list, a null or a
    misspelt value never hides what the next place says."""
    for settings in (generation_config, config):
        ids = _ids(settings.get("eos_token_id"))
        if ids:
            return ids
    token = tokenizer_config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    found = id_of(text) if isinstance(text, str) else None
    return frozenset() if found is None else frozenset({found})


def _ids(value: object) -> frozenset[int]:
    """Checkpoints write an id as a number, as a whole float, as digits, or as a list of those."""
    values = value if isinstance(value, list) else [value]
    return frozenset(id_ for id_ in map(_id, values) if id_ is not None)


def _id(value: object) -> int | None:
    if (isinstance(value, float) and value.is_integer()) or (
        isinstance(value, str) and len(value) <= MAX_DIGITS and value.isascii() and value.isdigit()
    ):
        value = int(value)
    return value if type(value) is int and value >= 0 else None
