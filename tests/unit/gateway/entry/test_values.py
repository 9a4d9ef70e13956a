from __future__ import annotations

import json

import pytest

from djinnd.gateway.entry.values import MAX_NESTS, MAX_TEXTS, MAX_VALUES, count_values
from djinnd.gateway.http.errors import HttpError


def test_a_long_text_is_one_value():
    body = {"model": "m", "prompt": '[1, {"a": "\\"}], ' * 100_000 + "\\"}
    assert count_values(json.dumps(body).encode()) == 3


def test_tokens_of_a_long_prompt():
    assert count_values(json.dumps({"prompt": list(range(131_072))}).encode()) >= 131_072


@pytest.mark.parametrize(
    ("unit", "count"),
    [
        ("[]", MAX_NESTS),
        ('{"\\\\":[{}]}', MAX_NESTS // 3),
        ("1", MAX_VALUES),
        ('"\\""', MAX_TEXTS),
        ('"\\\\"', MAX_TEXTS),
    ],
)
def test_too_many_values(unit, count):
    sent = "[" + ",".join([unit] * (count + 1)) + "]"
    json.loads(sent)
    with pytest.raises(HttpError) as refused:
        count_values(sent.encode())
    assert refused.value.problem.status == 413


def test_a_text_that_is_no_json_is_left_to_the_decoder():
    for sent in (b"", b'"' * 100_001, b"\\" * 100_001, b"\xff" * 100_000):
        assert count_values(sent) >= 0
