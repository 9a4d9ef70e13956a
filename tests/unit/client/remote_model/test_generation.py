"""Each setting of transformers' GenerationConfig changes a call, is refused, or is known to have no effect."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer, GenerationConfig, MaxTimeCriteria

from djinn_client.errors import InvalidRequest
from djinn_client.remote_model.arguments import HONOURED, WITHOUT_EFFECT
from djinn_client.remote_model.generation import prepared
from tests.support.models import tiny_model

SETTINGS = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))
PROMPT = [[7, 0, 8]]
SAMPLED = {"do_sample": True}

# Setting → a value with an effect, and the settings beside it that the effect needs.
EFFECTIVE: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_length": (9, {"max_new_tokens": None}),
    "max_new_tokens": (5, {}),
    "min_length": (6, {}),
    "min_new_tokens": (2, {}),
    "max_time": (3.0, {}),
    "stop_strings": ("x", {}),
    "do_sample": (True, {}),
    "temperature": (0.5, SAMPLED),
    "top_k": (9, SAMPLED),
    "top_p": (0.8, SAMPLED),
    "min_p": (0.1, SAMPLED),
    "repetition_penalty": (1.5, {}),
    "num_return_sequences": (2, SAMPLED),
    "bos_token_id": (3, {}),
    "eos_token_id": (4, {}),
    "pad_token_id": (0, {}),
    "return_dict_in_generate": (True, {"output_logits": True}),
    "output_logits": (True, {"return_dict_in_generate": True}),
}


def effect(config: GenerationConfig, inputs: Any = PROMPT) -> list[Any]:
    """The prompts, options, ends and outputs of a call with this configuration. Raises InvalidRequest."""
    made = prepared(
        config,
        inputs,
        None,
        stopping_criteria=None,
        tokenizer=AutoTokenizer.from_pretrained(tiny_model()),
        context=None,
        is_length_given=config.max_new_tokens is None,
        vocab=100,
    )
    ends = [each.max_time if isinstance(each, MaxTimeCriteria) else type(each) for each in made.criteria]
    return [made.batch.rows, dict(made.options), ends, made.copies, made.pad, made.with_logits]


def config_of(**settings: Any) -> GenerationConfig:
    return GenerationConfig(**{"max_length": 20, "max_new_tokens": 8, "bos_token_id": 1} | settings)


def test_each_honoured_setting_has_an_effective_value() -> None:
    assert EFFECTIVE.keys() == HONOURED & SETTINGS


@pytest.mark.parametrize("name", sorted(EFFECTIVE))
def test_an_honoured_setting_changes_the_call(name: str) -> None:
    value, beside = EFFECTIVE[name]
    inputs = None if name == "bos_token_id" else PROMPT
    assert effect(config_of(**beside), inputs) != effect(config_of(**beside | {name: value}), inputs)


@pytest.mark.parametrize("name", sorted(SETTINGS - HONOURED - WITHOUT_EFFECT))
def test_a_setting_that_is_not_honoured_raises(name: str) -> None:
    config = config_of()
    setattr(config, name, 17)  # past the checks of transformers itself
    with pytest.raises(InvalidRequest, match=f"does not take {name} "):
        effect(config)


def test_a_setting_of_a_later_transformers_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("djinn_client.remote_model.settings._KNOWN", SETTINGS | {"of_tomorrow"})
    with pytest.raises(InvalidRequest, match="does not take of_tomorrow "):
        effect(config_of(of_tomorrow=1))
