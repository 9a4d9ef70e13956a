"""transformers' GenerationConfig as options of the daemon."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, MaxTimeCriteria

from djinn_client.errors import InvalidRequest
from djinn_client.remote_model.lengths import NewTokens
from djinn_client.remote_model.settings import check_config, criteria_of, end_tokens, options_of, pad_token


def options(**settings: Any) -> dict[str, Any]:
    return dict(options_of(GenerationConfig(**settings), NewTokens(8, 2), vocab=100))


def test_greedy_calls_have_no_sampling_options_whatever_the_config_says() -> None:
    assert options(temperature=0.5, top_k=9, repetition_penalty=1.5, eos_token_id=[3, 100, -1]) == {
        "max_tokens": 8,
        "min_tokens": 2,
        "ignore_eos": True,  # the config's end tokens replace the checkpoint's
        "stop_token_ids": [3],
        "repetition_penalty": 1.5,
    }


def test_sampling_options_have_their_values_and_off_where_there_is_none() -> None:
    given = options(do_sample=True, temperature=0.5, top_k=9, top_p=0.8, min_p=0.1)
    assert [given[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [0.5, 9, 0.8, 0.1]
    absent = options(do_sample=True)
    assert [absent[name] for name in ("temperature", "top_k", "top_p", "min_p")] == [1.0, 0, 1.0, 0.0]


def test_sampling_needs_a_temperature_above_zero() -> None:
    with pytest.raises(InvalidRequest, match=r"temperature is 0.0; it must be above 0: do_sample=False is greedy"):
        options(do_sample=True, temperature=0.0)


def test_the_first_end_token_is_the_padding_of_a_model_without_one() -> None:
    assert (end_tokens(GenerationConfig(eos_token_id=4)), pad_token(GenerationConfig(eos_token_id=[4, 5]))) == ([4], 4)
    assert pad_token(GenerationConfig(eos_token_id=4, pad_token_id=0)) == 0
    assert (end_tokens(GenerationConfig()), pad_token(GenerationConfig())) == ([], None)


def test_entries_that_transformers_does_not_know_are_without_effect() -> None:
    check_config(GenerationConfig(chat_format="chatml", max_new_tokens=4))
    with pytest.raises(InvalidRequest, match="num_beams"):
        check_config(GenerationConfig(num_beams=4))


def test_criteria_end_at_length_end_token_time_and_the_callers_own() -> None:
    own = [lambda ids, scores: ids[:, -1] == 9]
    config = GenerationConfig(eos_token_id=3, max_time=5.0)
    found = criteria_of(config, 12, own, None)
    assert [type(each) for each in found[:3]] == [MaxLengthCriteria, EosTokenCriteria, MaxTimeCriteria]
    assert found[3] is own[0] and found.max_length == 12


def test_criteria_of_the_calls_own_kinds_and_stop_strings_without_a_tokenizer_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="a MaxLengthCriteria would replace that of the call: give max_new_tokens"):
        criteria_of(GenerationConfig(), 12, [MaxLengthCriteria(5)], None)
    with pytest.raises(InvalidRequest, match="stop_strings need the model's tokenizer: give tokenizer="):
        criteria_of(GenerationConfig(stop_strings="x"), 12, None, None)
