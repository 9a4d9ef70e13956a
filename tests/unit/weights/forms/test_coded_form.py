"""Where the parts of coded matrices are in a buffer."""

from __future__ import annotations

import pytest
import torch

from djinnd.weights.forms.coded_form import Code, CodedForm
from djinnd.weights.forms.coding import Coding
from djinnd.weights.forms.codings import Float4, Grouped, Scaled
from djinnd.weights.layout import Layout
from tests.support.coded import random_parts

COLS = 256
UNIT = tuple(f"self_attn.{name}_proj.weight" for name in "qkv")
FP8 = Scaled(torch.float8_e4m3fn, 128, 64)
ROWS = Scaled(torch.int8, 1)


def form_of(codings: tuple[Coding, ...], heights: tuple[int, ...], is_transposed: bool = False) -> CodedForm:
    codes = {name: Code(coding, is_transposed) for name, coding in zip(UNIT, codings, strict=False)}
    shapes = {name: (height, COLS) for name, height in zip(UNIT, heights, strict=True)}
    return CodedForm(Layout(shapes.items()), codes, torch.bfloat16)


@pytest.mark.parametrize("coding", [FP8, ROWS, Float4(), Grouped(4, 64, has_zeros=True)], ids=repr)
def test_matrices_with_the_same_code_are_one_matrix(coding: Coding) -> None:
    heights = (384, 128, 128)
    form = form_of((coding,) * 3, heights)
    (unit,) = form.layout.units
    whole = random_parts(coding, sum(heights), COLS, 1)
    stored = torch.zeros(form.nbytes, dtype=torch.uint8)
    joined = form.joined(stored, unit)
    assert joined is not None and joined[0] == Code(coding)
    for part, content in zip(joined[1], whole, strict=True):
        part.view(torch.uint8).copy_(content.contiguous().view(torch.uint8))
    wanted = torch.empty(1, sum(heights), COLS)
    coding.decode(whole, wanted)
    plain = torch.zeros(form.numel)
    form.decode(stored, plain)
    assert torch.equal(form.layout.joined(plain, unit), wanted[0]) and wanted.any()
    assert sum(part.nbytes for name in unit for part in form.parts(stored, name)) == sum(p.nbytes for p in joined[1])


@pytest.mark.parametrize(
    ("codings", "heights", "is_transposed"),
    [
        ((FP8, FP8, ROWS), (128, 128, 128), False),
        ((FP8, FP8), (128, 128, 128), False),  # v has none
        ((FP8, FP8, FP8), (200, 128, 184), False),  # scales of 128 rows would be shared by q and k
        ((Scaled(torch.float8_e4m3fn),) * 3, (128, 128, 128), False),  # one scale a matrix
        ((Grouped(4, 64, has_order=True),) * 3, (128, 128, 128), False),  # an order of columns a matrix
        ((Float4(), Float4(), Float4()), (128, 1, 127), False),  # the scales of v would begin at any byte
        ((ROWS, ROWS, ROWS), (256, 256, 256), True),
    ],
)
def test_other_matrices_are_stored_one_by_one(
    codings: tuple[Coding, ...], heights: tuple[int, ...], is_transposed: bool
) -> None:
    form = form_of(codings, heights, is_transposed)
    stored = torch.zeros(form.nbytes, dtype=torch.uint8)
    assert all(form.joined(stored, unit) is None for unit in form.layout.units)


def test_places_tell_forms_apart_that_are_as_large() -> None:
    one, other = form_of((ROWS,) * 3, (128, 128, 128)), form_of((ROWS,) * 3, (128, 128, 128), True)
    assert one.joined(torch.zeros(one.nbytes, dtype=torch.uint8), UNIT) is not None
    assert one.places != other.places


MIXED = {"q": (FP8, 256), "k": (None, 128), "v": (ROWS, 128)}


def mixed() -> CodedForm:
    """A block of single matrices: one in FP8, one plain, one in int8; and a vector."""
    shapes = {f"{name}.weight": (rows, COLS) for name, (_, rows) in MIXED.items()} | {"norm.weight": (COLS,)}
    codes = {f"{name}.weight": Code(coding) for name, (coding, _) in MIXED.items() if coding is not None}
    return CodedForm(Layout(shapes.items()), codes, torch.bfloat16)


@pytest.mark.parametrize("form", [mixed(), form_of((ROWS,) * 3, (128, 128, 128))], ids=["mixed", "joined"])
def test_a_span_has_all_bytes_of_a_unit_and_no_others(form: CodedForm) -> None:
    """Other bytes in the unit's span change this unit, and nothing else."""
    generator = torch.Generator().manual_seed(0)
    stored = torch.randint(32, 64, (form.nbytes,), dtype=torch.uint8, generator=generator)  # no code of a NaN
    plain = torch.empty(form.numel)
    form.unpack(stored, plain)
    for unit in form.layout.units:
        span, changed = form.span(unit), stored.clone()
        changed[span.start : span.stop] = 65
        got = torch.empty(form.numel)
        form.unpack(changed, got)
        different = [
            name for name, view in form.layout.views(got).items() if not view.equal(form.layout.views(plain)[name])
        ]
        assert different == list(unit)
        assert (form.layout.joined(got, unit) != form.layout.joined(plain, unit)).all()


def test_missing_matrices_are_not_decoded() -> None:
    form = mixed()
    stored, plain = torch.zeros(form.nbytes, dtype=torch.uint8), torch.full((form.numel,), -1.0)
    form.decode(stored, plain, missing=("q.weight",))
    decoded = {name for name, view in form.layout.views(plain).items() if (view == 0).all()}
    assert decoded == {"v.weight"}, "k is plain, and q is missing"


def test_the_coding_of_a_unit_is_that_of_its_one_matrix() -> None:
    form = mixed()
    assert [form.coding_of((f"{name}.weight",)) for name in MIXED] == [FP8, None, ROWS]
    assert [form.is_plain((f"{name}.weight",)) for name in MIXED] == [False, True, False]
    one_by_one = form_of((FP8, FP8, ROWS), (128, 128, 128))
    assert one_by_one.coding_of(UNIT) is None and not one_by_one.is_plain(UNIT)
