"""The digest of files and weights that are handed over."""

from __future__ import annotations

import torch

from djinn_client.handover.content import digest
from djinn_client.handover.named_tensors import NamedTensors

FILES = {"config.json": b"{}"}


def test_equal_files_and_tensors_have_one_digest_whatever_their_order_and_strides() -> None:
    square = torch.arange(4.0, dtype=torch.bfloat16).reshape(2, 2)
    first = {"a": square, "b": torch.tensor(1.0)}
    second = {"b": torch.tensor(1.0), "a": square.T.contiguous().T}
    assert digest(FILES, NamedTensors.of(first)) == digest(FILES, NamedTensors.of(second)) != ""


def test_any_difference_changes_it() -> None:
    weights = {"a": torch.zeros(2, 3)}
    digests = [
        digest(FILES, NamedTensors.of(weights)),
        digest({"config.json": b"[]"}, NamedTensors.of(weights)),
        digest(FILES, NamedTensors.of({"b": torch.zeros(2, 3)})),
        digest(FILES, NamedTensors.of({"a": torch.zeros(3, 2)})),
        digest(FILES, NamedTensors.of({"a": torch.zeros(2, 3, dtype=torch.int32)})),
        digest(FILES, NamedTensors.of({"a": -torch.zeros(2, 3)})),
    ]
    assert len(set(digests)) == len(digests)


def test_tensors_that_are_made_on_demand_have_none() -> None:
    assert digest(FILES, NamedTensors.of(lambda name: torch.zeros(1))) == ""
