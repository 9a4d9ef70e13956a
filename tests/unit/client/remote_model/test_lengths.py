"""The number of new tokens of a call of `generate`, by transformers' rules."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import GenerationConfig

from djinn_client.errors import InvalidRequest
from djinn_client.remote_model.lengths import NewTokens, new_tokens


def counted(*, is_length_given: bool = True, context: int | None = 64, **settings: Any) -> NewTokens:
    config = GenerationConfig(**{"max_length": 20, "min_length": 0} | settings)
    return new_tokens(config, 10, context, is_length_given)


def test_max_new_tokens_comes_before_max_length() -> None:
    assert counted(max_new_tokens=32) == NewTokens(32, 0)


def test_max_length_counts_the_prompt_unless_it_is_the_default() -> None:
    assert counted(max_length=25).most == 15
    assert counted(is_length_given=False).most == 20
    assert counted(is_length_given=False, context=24).most == 14
    assert counted(is_length_given=False, context=None).most == 20


def test_min_length_counts_the_prompt_and_the_least_is_never_above_the_most() -> None:
    assert counted(min_length=13).least == 3
    assert counted(min_length=4).least == 0
    assert counted(min_length=13, min_new_tokens=7).least == 7
    assert counted(max_new_tokens=5, min_new_tokens=7).least == 5


def test_a_prompt_longer_than_max_length_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="the prompt has 10 tokens, and max_length is 10: give max_new_tokens"):
        counted(max_length=10)
