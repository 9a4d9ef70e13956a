from __future__ import annotations

import math
import struct
from array import array

import pytest

from djinn_client.protocol.fields.kv_layout import ITEM_BYTES
from djinnd.server.admission.values import first_unfinite, has_direction


def float32(*values):
    return array("f", values).tobytes()


def float16(*values):
    return struct.pack(f"<{len(values)}e", *values)


def bfloat16(*values):
    """Truncated float32 values, as bfloat16."""
    return b"".join(struct.pack("<f", value)[2:] for value in values)


FORMS = {"float32": float32, "bfloat16": bfloat16, "float16": float16}
LARGEST = {"float32": 3.4028234663852886e38, "bfloat16": 3.3895e38, "float16": 65504.0}


@pytest.mark.parametrize("dtype", FORMS)
def test_finite_numbers_of_all_sizes_are_accepted(dtype):
    form, largest = FORMS[dtype], LARGEST[dtype]
    values = form(0.0, -0.0, 1.0, -1.0, largest, -largest, 6e-8, -6e-8)
    assert len(values) == 8 * ITEM_BYTES[dtype]
    assert first_unfinite(values, dtype) is None
    assert first_unfinite(values * 3000, dtype) is None
    assert first_unfinite(b"", dtype) is None


@pytest.mark.parametrize("dtype", FORMS)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 1, 4095, 4096, 8191, 8192, 9999])
def test_the_index_of_the_first_value_that_is_not_finite(dtype, bad, place):
    largest = LARGEST[dtype]
    values = [-largest] * 10_000
    values[place] = bad
    values[-1] = math.inf
    assert first_unfinite(FORMS[dtype](*values), dtype) == place


@pytest.mark.parametrize("dtype", FORMS)
def test_a_vector_of_zeros_has_no_direction(dtype):
    form = FORMS[dtype]
    assert not has_direction(form(*[0.0, -0.0] * 500), dtype)
    assert has_direction(form(*[0.0] * 999, -1e-7), dtype)
    assert has_direction(form(1.0), dtype)


def test_a_vector_with_squares_that_vanish_in_float32_has_no_direction():
    assert not has_direction(float32(1e-30, -1e-20), "float32")
    assert not has_direction(bfloat16(1e-30, -1e-20), "bfloat16")
    assert has_direction(float32(1e-30, -(2.0**-63)), "float32")
    assert has_direction(bfloat16(2.0**-63), "bfloat16")
