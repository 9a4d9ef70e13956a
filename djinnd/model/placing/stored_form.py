"""Decodes the stored form of a block: the packed code of 12 bits, or the codes of the checkpoint.

Decoded is the plain buffer of the block's Layout. The kernels of CUDA are imported where they are called, because
Triton comes only with CUDA builds of torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import linear

from djinn_client.handover.packed import PackedForm
from djinnd.model.placing.projections import FewRows, Product
from djinnd.weights.forms.coded_form import CodedForm
from djinnd.weights.layout import Layout
from djinnd.weights.store import BufferForm

if TYPE_CHECKING:
    from djinnd.model.kernels.experts.matrices import Matrices


def decode_all(form: BufferForm, stored: Tensor, out: Tensor) -> None:
    """Writes the whole plain buffer to `out`: [numel], bfloat16 if the form is packed, else any float dtype."""
    if isinstance(form, PackedForm) and out.is_cuda:
        from djinnd.model.kernels.packed.unpack import unpack

        unpack(form, stored, out)
    else:
        form.unpack(stored, out)


def decode_for_step(
    form: BufferForm, layout: Layout, stored: Tensor, out: Tensor, missing: Sequence[tuple[str, ...]] = ()
) -> None:
    """Writes to `out` the parameters that modules do not read in place. Queues only kernels over fixed addresses.

    missing: units that are not in `stored`. On a CPU, anything may be written to the places of packed ones.
    """
    if isinstance(form, CodedForm):
        _decode_codes(form, stored, out, {name for unit in missing for name in unit})
    elif out.is_cuda:
        decode_units(form, units_beside(form, layout, missing), stored, out)
    else:
        form.unpack(stored, out)


def _decode_codes(form: CodedForm, stored: Tensor, out: Tensor, missing: set[str]) -> None:
    if out.is_cuda:
        from djinnd.model.kernels.coded.decode import decode_on_device

        form.decode(stored, out, decode_on_device, missing)
    else:
        form.decode(stored, out, missing=missing)


def decode_units(form: PackedForm, numbers: Sequence[int], stored: Tensor, out: Tensor) -> None:
    """Writes these units of a packed block on the GPU to their places in `out`, for a step of few rows."""
    from djinnd.model.kernels.packed.unpack import unpack_units

    unpack_units(form, numbers, stored, out)


def in_place(form: BufferForm, layout: Layout, stored: Tensor) -> dict[str, Tensor]:
    """The parameters that modules read in the stored form itself, as views."""
    return form.plain(stored) if isinstance(form, CodedForm) else layout.views_of_end(form.verbatim_view(stored))


def weight_of(form: BufferForm, layout: Layout, unit: tuple[str, ...], stored: Tensor, plain: Tensor) -> Tensor:
    """The matrix of a unit, [rows, cols]: in place where it is neither coded nor packed, else in the plain buffer."""
    if isinstance(form, CodedForm):
        there = form.plain_unit(stored, unit)
        return layout.joined(plain, unit) if there is None else there
    is_packed = layout.entries[unit[0]].offset < form.matrices
    return layout.joined(plain if is_packed else form.verbatim_view(stored), unit)


def few_rows(form: BufferForm, layout: Layout, products: list[Product], stored: Tensor) -> dict[int, FewRows]:
    """Functions that multiply few rows by the stored form, by the product's index.

    Of a packed block, units without one are decoded before every step (`decode_units`). Of a block in a checkpoint's
    code, either all matrices with a code have one, or none: the block is then decoded before every step.
    """
    if not stored.is_cuda:
        return {}
    if isinstance(form, CodedForm):
        return coded_few_rows(form, products, stored)
    return packed_few_rows(form, layout, products, stored)


def packed_few_rows(form: PackedForm, layout: Layout, products: list[Product], stored: Tensor) -> dict[int, FewRows]:
    """The functions of a packed block: one for each matrix that a kernel can multiply by in its packed form. Products
    with small matrices, which are not packed, need none."""
    from djinnd.model.kernels.packed.product import packed_product, product_fits

    numbers = {i: layout.units.index(product.unit) for i, product in enumerate(products)}
    packed = {i: number for i, number in numbers.items() if number < len(form.units)}
    fitting = {i: number for i, number in packed.items() if product_fits(form.units[number])}
    return {i: partial(packed_product, form, number, stored) for i, number in fitting.items()}


def units_beside(form: BufferForm, layout: Layout, others: Iterable[tuple[str, ...]]) -> list[int]:
    """The numbers of the packed units beside these: besides those that are multiplied as they are stored, a large
    router's matrix, for example."""
    if not isinstance(form, PackedForm):
        return []
    known = set(others)
    return [number for number, unit in enumerate(layout.units[: len(form.units)]) if unit not in known]


def coded_few_rows(form: CodedForm, products: list[Product], stored: Tensor) -> dict[int, FewRows]:
    """Like `few_rows`. Products without a code read their weights in place, and need no function."""
    from djinnd.model.kernels.coded.product import product_fits

    own = {i: product.unit for i, product in enumerate(products) if any(name in form.codes for name in product.unit)}
    of_products = {name for unit in own.values() for name in unit}
    for name, code in form.codes.items():
        shape = code.stack_shape(form.layout.entries[name].shape)
        if name not in of_products or code.is_transposed or shape[0] > 1 or not product_fits(code.coding, *shape[1:]):
            return {}
    return {i: partial(_multiply_codes, form, unit, stored) for i, unit in own.items()}


def _multiply_codes(form: CodedForm, unit: tuple[str, ...], stored: Tensor, x: Tensor, bias: Tensor | None) -> Tensor:
    """x [rows, in] times the transposed matrices of a unit, plus bias [out] → [rows, out]. Where the unit is not one
    coded matrix, each matrix writes its own columns."""
    from djinnd.model.kernels.coded.product import coded_product, product_fits

    joined = form.joined(stored, unit)
    if joined is not None and product_fits(joined[0].coding, *form.layout.unit_shape(unit)):
        return coded_product(joined[0].coding, joined[1], x, bias=bias)
    heights = [form.layout.entries[name].shape[0] for name in unit]
    y = torch.empty(len(x), sum(heights), dtype=x.dtype, device=x.device)
    biases: Sequence[Tensor | None] = [None] * len(unit) if bias is None else bias.split(heights)
    for name, columns, own in zip(unit, y.split(heights, dim=1), biases, strict=True):
        if name in form.codes:
            coded_product(form.codes[name].coding, form.parts(stored, name), x, columns, own)
        else:
            columns.copy_(linear(x, form.alone(stored, name), own))
    return y


def stored_experts(form: BufferForm | None, stored: Tensor, is_transposed: bool) -> dict[str, Matrices] | None:
    """The stacks of experts as their form has them, by the last part of their parameters' names. None if kernels cannot
    multiply by them.

    is_transposed: the parameters are [experts, in, out].
    """
    if not isinstance(form, CodedForm) or not form.codes:
        return None
    from djinnd.model.kernels.experts.matrices import coded_matrices, plain_matrices

    plain, found = form.plain(stored), {}
    for name, entry in form.layout.entries.items():
        if name not in form.codes:
            matrices = plain_matrices(plain[name], is_transposed=is_transposed)
        else:
            code, parts = form.codes[name], form.parts(stored, name)
            _, rows, cols = code.stack_shape(entry.shape)
            coded = coded_matrices(code.coding, parts, rows, cols) if code.is_transposed == is_transposed else None
            if coded is None:
                return None
            matrices = coded
        found[name.rpartition(".")[2]] = matrices
    return found
