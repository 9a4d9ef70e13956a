"""A batch's rows without their padding, and results at the places of the tokens."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from djinn_client.errors import InvalidRequest
from djinn_client.remote_model.padding import batch_of, spread

IDS = [[0, 0, 5], [6, 7, 8], [9, 0, 0]]
MASK = [[0, 0, 1], [1, 1, 1], [1, 0, 0]]


def test_a_mask_tells_the_padding_on_either_side() -> None:
    assert batch_of(torch.tensor(IDS), torch.tensor(MASK)).rows == [[5], [6, 7, 8], [9]]


def test_without_a_mask_the_padding_token_tells_it_if_there_is_one() -> None:
    assert batch_of(IDS, None, 0).rows == [[5], [6, 7, 8], [9]]
    assert batch_of(IDS, None).rows == IDS


def test_results_are_zero_at_the_padding() -> None:
    rows = [torch.full((1, 2), 5.0), torch.full((3, 2), 6.0), torch.full((1, 2), 9.0)]
    assert spread(rows, torch.tensor(MASK, dtype=torch.bool))[:, :, 1].tolist() == [[0, 0, 5], [6, 6, 6], [9, 0, 0]]


@pytest.mark.parametrize(
    ("ids", "mask", "told"),
    [
        ([1, 2], None, r"torch.int64 of shape \(2,\); they must be integers \[rows, length\]"),
        ([[0.5]], None, r"torch.float32 of shape \(1, 1\)"),
        (torch.zeros(0, 3, dtype=torch.int64), None, "the batch has no row"),
        (IDS, [[1, 1, 1], [0, 0, 0], [0, 0, 0]], r"these rows have no token: \[1, 2\]"),
        (IDS, [[1, 1, 1]], r"attention_mask is \(1, 3\); it must be that of input_ids, \(3, 3\)"),
    ],
)
def test_other_shapes_and_empty_rows_are_refused(ids: Any, mask: Any, told: str) -> None:
    with pytest.raises(InvalidRequest, match=told):
        batch_of(ids, mask)
