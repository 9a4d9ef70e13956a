from __future__ import annotations

from typing import Any

import pytest

from djinn_client.arguments.options import build, generate_request, token_ids
from djinn_client.errors import InvalidRequest
from djinn_client.protocol import ForkSession, Generate, OpenSession, PauseSession, Request


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"temperature": "hot"}, "temperature is 'hot'; it must be a number"),
        ({"max_tokens": 1.5}, "max_tokens is 1.5; it must be a whole number or None"),
        ({"logprobs": True}, "logprobs is True; it must be a whole number or None: 0 tells that of the chosen token, "),
        ({"prompt_logprobs": "all"}, "prompt_logprobs is 'all'; it must be a whole number or None: 0 tells those of "),
        ({"stop": 7}, "stop is 7; it must be a list"),
        ({"logit_bias": [1]}, "logit_bias is [1]; it must be a dict"),
        ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, "logit_bias has 1,025 entries: at most 1,024"),
        ({"ignore_eos": "yes"}, "ignore_eos is 'yes'; it must be True or False"),
        ({"seed": "x" * 1000}, "seed is 'xxx"),
        ({"stop": ["a", 1]}, "stop[1] is 1; it must be a text"),
        ({"logit_bias": {5: "much"}}, "something in logit_bias is wrong: it must be a number"),
        ({"logit_bias": {"a": 1.0}}, "something in logit_bias is wrong: it must be a whole number"),
        ({"logit_bias": {-1: 1.0}}, "something in logit_bias is wrong: it must be at least 0"),
    ],
)
def test_an_option_of_the_wrong_type_is_told_with_what_was_written(options: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        generate_request("s", "text", options, stream=False)  # type: ignore[arg-type]
    assert caught.value.message.startswith(told) and len(caught.value.message) < 250


def test_a_number_that_is_out_of_its_bounds() -> None:
    with pytest.raises(InvalidRequest, match="max_tokens is 18446744073709551616; it must be at most 9,223,372"):
        build(Generate, session="s", max_tokens=1 << 64)


@pytest.mark.parametrize(
    ("message", "fields", "told"),
    [
        (
            OpenSession,
            {"model": "m", "priority": "urgent"},
            "priority is 'urgent'; it must be one of interactive, agent, batch",
        ),
        (
            ForkSession,
            {"session": "s", "priority": "a\nb"},
            r"priority is 'a\nb'; it must be one of interactive, agent, batch",
        ),
        (PauseSession, {"session": "s", "tier": "tape"}, "tier is 'tape'; it must be one of device, host, disk"),
        (OpenSession, {"model": "m", "priority": 3}, "priority is 3; it must be a text"),
    ],
)
def test_a_word_that_does_not_exist_is_told_with_those_that_do(
    message: type[Request], fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(InvalidRequest) as caught:
        build(message, **fields)
    assert caught.value.message.startswith(told)


@pytest.mark.parametrize("prompt", [[{"role": "user", "content": "hi"}], ({"role": "user"},)])
def test_messages_are_for_chat(prompt: Any) -> None:
    with pytest.raises(InvalidRequest, match=r"these are messages: chat\(messages\) takes them"):
        token_ids(prompt)
