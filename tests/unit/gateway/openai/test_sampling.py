from __future__ import annotations

import msgspec

from djinnd.gateway.openai import chat, completions


def decoded(body, fields):
    return msgspec.json.decode(msgspec.json.encode(fields), type=body).generation()


def test_latency_targets_of_a_body_reach_the_call():
    for body, prompt in (
        (chat.Body, {"messages": [{"role": "user", "content": "a"}]}),
        (completions.Body, {"prompt": "a"}),
    ):
        fields = {"model": "m", "between_tokens_s": 0.02, "first_token_s": 0, **prompt}
        wanted = decoded(body, fields)
        assert (wanted.between_tokens_s, wanted.first_token_s) == (0.02, 0.0)
        wanted = decoded(body, {"model": "m", **prompt})
        assert (wanted.between_tokens_s, wanted.first_token_s) == (None, None)
