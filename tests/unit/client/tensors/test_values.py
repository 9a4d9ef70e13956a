from __future__ import annotations

import array

import numpy as np
import pytest
import torch

from djinn_client.errors import InvalidRequest
from djinn_client.tensors.activation import Activation
from djinn_client.tensors.values import MAX_VALUES, positions_of, values_of

ROWS = [[1.0, -2.5], [0.25, 3.0], [0.0, 8.0]]
FLOAT32 = np.array(ROWS, np.float32).tobytes()


@pytest.mark.parametrize(
    "vector",
    [
        ROWS,
        tuple(map(tuple, ROWS)),
        [np.array(row) for row in ROWS],
        np.array(ROWS),
        np.array(ROWS, np.float32),
        np.asfortranarray(np.array(ROWS, np.float32)),
        np.array([ROWS]),
        torch.tensor(ROWS),
        torch.tensor([ROWS], dtype=torch.float64),
        torch.tensor(ROWS).T.contiguous().T,
        torch.nn.Parameter(torch.tensor(ROWS)),
    ],
)
def test_rows_of_any_container_become_float32(vector: object) -> None:
    assert values_of(vector) == ("float32", 3, FLOAT32)


@pytest.mark.parametrize(
    "vector",
    [[1, 2, 3], (1.0, 2.0, 3.0), range(1, 4), array.array("d", [1, 2, 3]), np.arange(1, 4), torch.arange(1, 4)],
)
def test_a_vector_becomes_one_row(vector: object) -> None:
    assert values_of(vector) == ("float32", 1, np.array([1, 2, 3], np.float32).tobytes())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_stay_what_they_are(dtype: torch.dtype) -> None:
    tensor = torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    values = values_of(tensor.T.contiguous().T)
    assert values.dtype == str(dtype).removeprefix("torch.") and values.rows == 3
    assert torch.equal(torch.frombuffer(bytearray(values.data), dtype=dtype).view(3, 5), tensor)
    assert values_of(tensor[1]).data == values.data[10:20]


def test_float16_and_captured_bfloat16_keep_their_dtype() -> None:
    assert values_of(np.array(ROWS, np.float16)).dtype == "float16"
    bits = torch.tensor(ROWS).bfloat16().view(torch.uint16).numpy()
    captured = bits.view(Activation)
    captured.stored = "bfloat16"
    assert values_of(captured) == ("bfloat16", 3, bits.tobytes())
    assert values_of(captured[1:]) == ("bfloat16", 2, bits[1:].tobytes())  # a slice knows its dtype
    assert values_of(captured.astype(np.float32)).dtype == "float32"
    assert values_of(bits).dtype == "float32"  # without a dtype these are numbers


@pytest.mark.parametrize(
    ("vector", "words"),
    [
        ([], r"not \[0\]"),
        (1.0, r"not \[\]"),
        (np.zeros((2, 3, 4)), r"must be \[width\], or \[positions, width\], not \[2, 3, 4\]"),
        (torch.zeros(1, 1, 1, 4), r"not \[1, 1, 1, 4\]"),
        (torch.zeros(3, 0), r"not \[3, 0\]"),
        (["a", "b"], "must be numbers"),
        ([[1, 2], [3]], "must be numbers"),
        ([None], "must be numbers"),
        (np.array([1j]), "complex128 is none"),
        (object(), "object is none"),
    ],
)
def test_values_that_are_no_rows_of_numbers_are_refused(vector: object, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        values_of(vector)


def test_too_large_values_are_refused_with_the_figure() -> None:
    width = MAX_VALUES // 4 // 1024
    assert len(values_of(np.zeros((1024, width), np.float32)).data) == MAX_VALUES
    with pytest.raises(InvalidRequest, match=r"take 15,744,000 bytes, and one call can carry 15,728,640.*bfloat16"):
        values_of(np.zeros((1025, width), np.float32))
    assert values_of(torch.zeros(1025, width, dtype=torch.bfloat16)).rows == 1025


def test_a_number_that_float32_has_not_becomes_infinite() -> None:
    assert np.isinf(np.frombuffer(values_of([1e300]).data, np.float32)).all()


@pytest.mark.parametrize("positions", [[3, 4], (3, 4), range(3, 5), np.array([3, 4]), torch.tensor([3, 4])])
def test_positions_may_be_any_row_of_integers(positions: object) -> None:
    assert positions_of(positions) == [3, 4]  # type: ignore[arg-type]


@pytest.mark.parametrize("positions", [5, [1.5], [[1]], None, "ab", torch.tensor(3)])
def test_values_that_are_no_positions_are_refused(positions: object) -> None:
    with pytest.raises(InvalidRequest, match="a row of integers"):
        positions_of(positions)  # type: ignore[arg-type]


def test_more_positions_than_a_request_can_carry_are_refused_before_they_are_listed() -> None:
    with pytest.raises(InvalidRequest, match=r"one call can carry 3,145,728 positions, and these are more"):
        positions_of(range(10**15))
