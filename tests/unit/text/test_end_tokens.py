"""End tokens are read from whichever place names one, in every form that checkpoints use."""

from __future__ import annotations

import pytest

from djinnd.text.end_tokens import end_tokens


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ([], 6, {6}),
        ([None], 6, {6}),
        (["no", "numbers"], 6, {6}),
        ("6", None, {6}),
        (6.0, None, {6}),
        ([6, "7", 8.0], 9, {6, 7, 8}),
        (6, 9, {6}),
        (None, [6, 7], {6, 7}),
        (-1, 6, {6}),
        (True, 6, {6}),
        (6.5, 7, {7}),
        ("9" * 5000, 7, {7}),
        ([[6]], 7, {7}),
        ({}, None, set()),
    ],
)
def test_the_first_place_with_a_usable_id_counts(generation, config, expected):
    found = end_tokens({"eos_token_id": generation}, {"eos_token_id": config}, {}, lambda text: None)
    assert found == expected


def test_the_tokenizers_end_token_counts_where_nothing_else_does():
    ids = {"</s>": 2}
    assert end_tokens({}, {}, {"eos_token": "</s>"}, ids.get) == {2}
    assert end_tokens({}, {"eos_token_id": 3}, {"eos_token": "</s>"}, ids.get) == {3}
    assert end_tokens({}, {}, {"eos_token": 5}, ids.get) == set()
