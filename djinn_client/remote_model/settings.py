"""A GenerationConfig of transformers as options of the daemon's `generate`, and as stopping criteria."""

from __future__ import annotations

from typing import Any

import torch
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MaxTimeCriteria,
    StoppingCriteriaList,
    StopStringCriteria,
)

from djinn_client.arguments.options import GenerateOptions
from djinn_client.errors import InvalidRequest
from djinn_client.remote_model.arguments import check_generate
from djinn_client.remote_model.lengths import NewTokens

_KNOWN = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))


def check_config(config: GenerationConfig) -> None:
    """Raises InvalidRequest for a setting that is not honoured. Entries that transformers does not know have no effect
    there either."""
    check_generate({name: value for name, value in vars(config).items() if name in _KNOWN})


def end_tokens(config: GenerationConfig) -> list[int]:
    """The tokens that end an output."""
    ends = config.eos_token_id
    if ends is None:
        return []
    return [int(token) for token in torch.as_tensor(ends).flatten().tolist()]


def pad_token(config: GenerationConfig) -> int | None:
    """The padding token; without one of its own, a model has its first end token there."""
    pad = config.pad_token_id
    if pad is not None:
        return int(pad)
    return next(iter(end_tokens(config)), None)


def options_of(config: GenerationConfig, lengths: NewTokens, vocab: int) -> GenerateOptions:
    """Raises InvalidRequest for a temperature that is none."""
    options: GenerateOptions = {
        "max_tokens": lengths.most,
        "min_tokens": lengths.least,
        "ignore_eos": True,
        "stop_token_ids": [token for token in end_tokens(config) if 0 <= token < vocab],
        "repetition_penalty": _or(config.repetition_penalty, 1.0),
    }
    if not config.do_sample:
        return options
    temperature = _or(config.temperature, 1.0)
    if not temperature > 0:
        told = f"temperature is {temperature}; it must be above 0: do_sample=False is greedy"
        raise InvalidRequest(told, field="temperature")
    options["temperature"] = temperature
    options["top_k"] = _or(config.top_k, 0)
    options["top_p"] = min(_or(config.top_p, 1.0), 1.0)
    options["min_p"] = _or(config.min_p, 0.0)
    return options


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def drawn_seed() -> int:
    """A seed from torch's generator, so that `torch.manual_seed` repeats a call."""
    return int(torch.randint(1 << 62, ()))


def criteria_of(config: GenerationConfig, length: int, custom: Any, tokenizer: Any) -> StoppingCriteriaList:
    """`length`: of the longest sequence, with its padding. Raises InvalidRequest."""
    criteria = StoppingCriteriaList([MaxLengthCriteria(length)])
    if ends := end_tokens(config):
        criteria.append(EosTokenCriteria(ends))
    if config.max_time is not None:
        criteria.append(MaxTimeCriteria(config.max_time))
    if config.stop_strings is not None:
        if tokenizer is None:
            raise InvalidRequest("stop_strings need the model's tokenizer: give tokenizer=", field="stop_strings")
        criteria.append(StopStringCriteria(stop_strings=config.stop_strings, tokenizer=tokenizer))
    for each in custom or ():
        if isinstance(each, MaxLengthCriteria | EosTokenCriteria):
            told = f"a {type(each).__name__} would replace that of the call: give max_new_tokens and eos_token_id"
            raise InvalidRequest(told, field="stopping_criteria")
        criteria.append(each)
    return criteria
