from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from djinn_client.handover import packed as module
from djinn_client.handover.packed import FIRST_BASE, GROUP, PATCH, STRIPE, PackedForm, Unit, Unpackable
from tests.support.packed import ODD, form_of, packed, same_weights, tame, weights

SHAPES = [(70, 128), (3, 300), (200, 33), (1, 1)]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)


def test_the_client_does_not_import_it() -> None:
    code = (
        "import sys, djinn_client; "
        "assert 'djinn_client.handover.packed' not in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_parts_are_aligned_and_do_not_overlap() -> None:
    form = form_of(SHAPES, vectors=77)
    stripes = sum(-(-rows // STRIPE) for rows, _ in SHAPES) + 1
    parts = [
        (0, 256),
        (form.verbatim_at, 2 * 77),
        (form.sm_at, form.matrices),
        (form.nibbles_at, form.matrices // 2),
        (form.stripes_at, 4 * stripes),
        (form.patches_at, PATCH * form.capacity),
    ]
    for (start, size), (following, _) in zip(parts, [*parts[1:], (form.nbytes, 0)], strict=True):
        assert start % 256 == 0 and start + size <= following < start + size + 256
    assert form.capacity * 1024 >= form.matrices and form.nbytes % 256 == 0


def test_a_form_is_refused_where_its_units_leave_gaps() -> None:
    for units in ([Unit(128, 2, 64)], [Unit(0, 2, 64), Unit(200, 1, 128)], [], [Unit(0, 1, GROUP)] * 2):
        with pytest.raises(AssertionError):
            PackedForm(units, 10_000)
    with pytest.raises(Unpackable, match="4,294,967,296"):
        PackedForm([Unit(0, 1 << 16, 1 << 16)], 1 << 32)


@pytest.mark.parametrize("odd", [[], ODD[:6]], ids=["none", "some"])
def test_packed_weights_unpack_bit_for_bit(odd: list[float]) -> None:
    form = form_of(SHAPES[:3], vectors=77)
    plain = weights(form, odd)
    buffer, out = packed(form, plain), torch.empty_like(plain)
    form.unpack(buffer, out)
    assert same_weights(form, out, plain)
    assert torch.equal(form.verbatim_view(buffer), plain[form.matrices :])


def test_padding_of_a_unit_needs_no_patches() -> None:
    form = form_of([(1, 1)] * 5)
    plain = torch.full((form.numel,), float("nan"), dtype=torch.bfloat16)
    plain[:: form.units[0].numel] = 1.5
    buffer = packed(form, plain)
    assert form.head_view(buffer)[2] == 0


def test_large_units_are_packed_in_pieces_and_judged_by_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_PIECE", 1 << 12)
    monkeypatch.setattr(module, "SAMPLED_GROUPS", 31)
    form = form_of([(300, 128), (50, 300)], vectors=5)
    plain = weights(form, ODD[:5])
    buffer, out = packed(form, plain), torch.empty_like(plain)
    form.unpack(buffer, out)
    assert same_weights(form, out, plain)
    monkeypatch.undo()
    assert torch.equal(packed(form, plain), buffer)


def test_only_a_prefix_has_to_travel_and_nothing_old_is_in_it() -> None:
    form = form_of([(100, 128)], vectors=3)
    plain = weights(form, ODD[:4])
    first, second = torch.zeros(form.nbytes, dtype=torch.uint8), torch.full((form.nbytes,), 0xFF, dtype=torch.uint8)
    used = form.pack(plain, first)
    assert form.pack(plain, second) == used == form.used(first) == form.used(first[:used].clone())
    assert torch.equal(first[:used], second[:used])
    travelled, out = torch.full((form.nbytes,), 0x5A, dtype=torch.uint8), torch.empty_like(plain)
    travelled[:used] = first[:used]
    form.unpack(travelled, out)
    assert same_weights(form, out, plain)


def test_stripes_lead_to_the_patches_of_their_rows() -> None:
    form = form_of([(20, 128), (9, 256)])
    plain = tame(form)
    rows = [(0, 3), (0, 8), (0, 8), (1, 0), (1, 8)]
    for i, (number, row) in enumerate(rows):
        unit = form.units[number]
        plain[unit.offset + row * unit.cols + i] = 0.0
    buffer = packed(form, plain)
    assert form.head_view(buffer)[2] == len(rows)
    assert form.stripes_view(buffer).tolist() == [0, 1, 3, 3, 4, 5]
    assert [form.first_stripe(n) for n in (0, 1)] == [0, 3]
    at = form.patches_view(buffer)[: len(rows), 0].tolist()
    assert at == sorted(at) and at[-1] == form.units[1].offset + 8 * 256 + 4


def test_zeros_do_not_fit_the_code() -> None:
    form = form_of([(40, 128), (40, 256)])
    plain = tame(form)
    plain[form.units[1].offset :][:2000] = 0.0
    with pytest.raises(Unpackable, match=r"2,000 of 15,360 .* room for 32; worst is unit 1 \[40, 256\] with 19,531 in"):
        packed(form, plain)


def test_a_head_that_lies_is_refused() -> None:
    form = form_of([(40, 128)])
    good = packed(form, weights(form))
    for at, value in [(0, 1), (1, 2), (2, -1), (2, form.capacity + 1), (3, 2), (FIRST_BASE, 0), (FIRST_BASE, 240)]:
        bad = good.clone()
        form.head_view(bad)[at] = value
        with pytest.raises(ValueError, match="packed block"):
            form.used(bad)
    for size in (0, 255, form.used(good) - 1):
        with pytest.raises(ValueError, match="packed block"):
            form.used(good[:size].clone())


def test_patches_that_point_elsewhere_write_nothing() -> None:
    form = form_of([(40, 128)], vectors=64)
    plain = tame(form)
    buffer, out = packed(form, plain), torch.empty_like(plain)
    patches = form.patches_view(buffer)
    patches[:, 0] = torch.tensor([form.matrices, form.numel - 1, -1, 1 << 30]).repeat(len(patches) // 4)
    patches[:, 1] = 0x4242
    form.head_view(buffer)[2] = (1 << 31) - 1
    form.unpack(buffer, out)
    assert same_weights(form, out, plain)


ROWS = [(4 * 16, 128), (4 * 6, 64), (4 * 33, 384)]  # of four experts: whole stripes, and not


@pytest.mark.parametrize("odd", [[], ODD], ids=["none", "some"])
def test_some_rows_come_back_bit_for_bit_and_alone(odd: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CPU_PIECE", 2 * GROUP)
    form = form_of(ROWS, vectors=77)
    plain = weights(form, odd)
    buffer = packed(form, plain)
    for number, unit in enumerate(form.units):
        whole = plain[unit.offset :][: unit.weights].view(4, -1)
        for expert, wanted in enumerate(whole):
            out = torch.full((len(wanted) + 256,), 9.0, dtype=torch.bfloat16)
            form.unpack_rows(buffer, number, expert * unit.rows // 4, unit.rows // 4, out[: len(wanted)])
            assert torch.equal(out[: len(wanted)].view(torch.int16), wanted.view(torch.int16))
            assert (out[len(wanted) :] == 9).all()


def test_rows_that_are_no_whole_groups_are_not_unpacked() -> None:
    form = form_of([(20, 64)])
    buffer, out = packed(form, tame(form)), torch.empty(64 * 20, dtype=torch.bfloat16)
    form.unpack_rows(buffer, 0, 2, 4, out[: 64 * 4])
    for first, rows in ((1, 4), (2, 3), (18, 4), (-2, 2)):
        with pytest.raises(AssertionError):
            form.unpack_rows(buffer, 0, first, rows, out[: 64 * rows])


@pytest.mark.parametrize("lies", [[-5, 1 << 30], [-(1 << 31), (1 << 31) - 1], [7, -1]], ids=str)
def test_patches_and_stripes_that_lie_are_harmless_to_rows(lies: list[int]) -> None:
    form = form_of(ROWS)
    plain = tame(form)
    buffer, out = packed(form, plain), torch.full((form.numel,), 9.0, dtype=torch.bfloat16)
    form.head_view(buffer)[2] = (1 << 31) - 1
    stripes, patches = form.stripes_view(buffer), form.patches_view(buffer)
    stripes[:] = torch.tensor(lies).repeat(len(stripes) // 2 + 1)[: len(stripes)]
    patches[:, 0] = torch.tensor([form.matrices, -1, -(1 << 31), 0]).repeat(len(patches) // 4)
    patches[:, 1] = 0x4242
    unit = form.units[1]
    rows, start = unit.rows // 4, unit.weights // 4
    form.unpack_rows(buffer, 1, rows, rows, out[start : 2 * start])
    assert torch.equal(out[start : 2 * start], plain[unit.offset :][start : 2 * start])
    assert (out[:start] == 9).all() and (out[2 * start :] == 9).all()
