"""For any bits of a block: it is unpacked as it was, or packing is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from djinn_client.handover.packed import CODES, PackedForm, Unpackable
from tests.support.packed import form_of, packed, same_weights

SHAPES = st.lists(st.tuples(st.integers(1, 40), st.integers(1, 300)), min_size=1, max_size=4)
BITS = st.integers(0, 0xFFFF)


def block(form: PackedForm, lowest: int, exponents: int, strange: list[tuple[float, int]], seed: int) -> torch.Tensor:
    """Random signs and mantissas, `exponents` neighbouring exponents, and some strange bit patterns at any place."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(lowest, lowest + exponents, (form.numel,), generator=generator)
    rest = torch.randint(0, 256, (form.numel,), generator=generator)
    bits = (rest & 0x80) << 8 | exponent << 7 | rest & 0x7F
    for place, pattern in strange:
        bits[int(place * (form.numel - 1))] = pattern
    return bits.to(torch.int16).view(torch.bfloat16)


@given(
    shapes=SHAPES,
    vectors=st.integers(0, 100),
    lowest=st.integers(1, 255 - CODES),
    strange=st.lists(st.tuples(st.floats(0, 1), BITS), max_size=32),
    seed=st.integers(0, 1000),
)
def test_a_window_of_exponents_and_a_few_strange_patterns_come_back(
    shapes: list[tuple[int, int]], vectors: int, lowest: int, strange: list[tuple[float, int]], seed: int
) -> None:
    form = form_of(shapes, vectors)
    plain = block(form, lowest, CODES, strange, seed)
    buffer, out = packed(form, plain), torch.empty_like(plain)
    assert int(form.head_view(buffer)[2]) <= len(strange)
    form.unpack(buffer, out)
    assert same_weights(form, out, plain)
    assert form.used(buffer) <= form.nbytes


@given(shapes=SHAPES, lowest=st.integers(0, 200), exponents=st.integers(1, 55), seed=st.integers(0, 1000))
def test_blocks_with_any_exponents_come_back_or_are_refused(
    shapes: list[tuple[int, int]], lowest: int, exponents: int, seed: int
) -> None:
    form = form_of(shapes)
    plain = block(form, lowest, exponents, [], seed)
    try:
        buffer = packed(form, plain)
    except Unpackable:
        assert exponents > CODES or lowest == 0
        return
    out = torch.empty_like(plain)
    form.unpack(buffer, out)
    assert same_weights(form, out, plain)


@given(data=st.binary(min_size=16 * 4, max_size=48 * 4), start=st.sampled_from([0, 2, 16, "patches", "stripes"]))
def test_foreign_bytes_are_refused_or_harmless(data: bytes, start: int | str) -> None:
    form = form_of([(20, 128)], vectors=10)
    plain = block(form, 100, CODES, [], 0)
    buffer, out = packed(form, plain), torch.zeros(form.numel + 64, dtype=torch.bfloat16)
    at = (
        {"patches": form.patches_at, "stripes": form.stripes_at}.get(str(start), 0)
        if isinstance(start, str)
        else 4 * start
    )
    foreign = torch.frombuffer(bytearray(data), dtype=torch.uint8)[: form.nbytes - at]
    buffer[at : at + len(foreign)] = foreign
    form.head_view(buffer)[2] = form.capacity if isinstance(start, str) else form.head_view(buffer)[2]
    with suppress(ValueError):
        assert form.used(buffer) <= form.nbytes
    form.unpack(buffer, out[: form.numel])  # as an engine does that does not know
    assert not out[form.numel :].any()


def test_a_block_of_zeros_is_refused() -> None:
    form = form_of([(10, 128)])
    with pytest.raises(Unpackable, match="1,280 of 1,280"):
        packed(form, torch.zeros(form.numel, dtype=torch.bfloat16))
