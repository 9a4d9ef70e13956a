"""HostWeights: the matrices of a streamed block's MLP, in the forms by which the host multiplies.

    in the arena                               the host multiplies
    plain, in the dtype of computing           there
    plain in another dtype; packed             by plain copies
    int8 with one scale a row                  there
    int8 with scales for groups of columns     by copies of the codes, in two halves

Copies are in private memory. A load, or a move of blocks, makes them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from djinn_client.handover.packed import PackedForm
from djinnd.model.placing.host_matrix import (
    HostMatrix,
    PlainMatrix,
    int8_group,
    int8_matrix,
    is_multiplied_in_place,
    private,
)
from djinnd.weights.forms.coded_form import CodedForm
from djinnd.weights.forms.coding import Coding
from djinnd.weights.layout import Layout
from djinnd.weights.store import BufferForm

Unit = tuple[str, ...]


class HostWeights:
    """Where the matrices are in the block's host buffer, and what memory the host needs besides."""

    def __init__(
        self, form: BufferForm | None, layout: Layout, units: tuple[Unit, Unit], stored: torch.dtype, dtype: torch.dtype
    ) -> None:
        """units: gate and up, then down. stored: the dtype of weights without a code. dtype: of computing."""
        self._form, self._layout, self._units = form, layout, units
        self._dtype = dtype
        self._is_copied = stored is not dtype or isinstance(form, PackedForm)  # if it is plain

    @property
    def are_multiplied(self) -> bool:
        """True if the host multiplies by all of the matrices."""
        form = self._form
        if isinstance(form, CodedForm):
            return all(form.is_plain(unit) or self._coding(unit) for unit in self._units)
        return form is None or set(self._units) <= set(self._layout.large)

    def _coding(self, unit: Unit) -> Coding | None:
        """The unit's coding, if the host multiplies by its codes; None for a plain unit, or one of another code."""
        coding = self._form.coding_of(unit) if isinstance(self._form, CodedForm) else None
        is_multiplied = coding is not None and int8_group(coding, *self._layout.unit_shape(unit)) is not None
        return coding if is_multiplied else None

    @property
    def nbytes(self) -> int:
        """The bytes of weights that the host reads to multiply."""
        sizes = [(math.prod(self._layout.unit_shape(unit)), self._coding(unit)) for unit in self._units]
        return sum(numel * (self._dtype.itemsize if coding is None else 1) for numel, coding in sizes)

    @property
    def copied_bytes(self) -> int:
        """Private memory of the matrices."""
        total = 0
        for unit in self._units:
            rows, cols = self._layout.unit_shape(unit)
            if (coding := self._coding(unit)) is None:
                total += rows * cols * self._dtype.itemsize * self._is_copied
            elif not is_multiplied_in_place(coding, rows, cols):
                total += rows * cols
        return total

    def spans(self) -> list[range]:
        """The elements of the host buffer that only these matrices need, in order."""
        form, layout = self._form, self._layout
        units = sorted(self._units, key=lambda unit: layout.entries[unit[0]].offset)
        if form is None:
            return [range(layout.entries[unit[0]].offset, layout.entries[unit[-1]].end) for unit in units]
        if isinstance(form, CodedForm):
            return [form.span(unit) for unit in units]
        packed = [form.units[layout.large.index(unit)] for unit in units]
        rests = [range(form.sm_at + unit.offset, form.sm_at + unit.offset + unit.numel) for unit in packed]
        at = form.nibbles_at
        return rests + [range(at + unit.offset // 2, at + (unit.offset + unit.numel) // 2) for unit in packed]

    def matrices(self, buffer: Tensor) -> tuple[HostMatrix, HostMatrix]:
        """buffer: the block's host buffer, or for a packed block its decoded weights, on any device."""
        gate_up, down = (self._matrix(buffer, unit) for unit in self._units)
        return gate_up, down

    def _matrix(self, buffer: Tensor, unit: Unit) -> HostMatrix:
        form = self._form
        if not isinstance(form, CodedForm):
            return self._plain(self._layout.joined(buffer, unit))
        if (coding := self._coding(unit)) is None:
            weight = form.plain_unit(buffer, unit)
            assert weight is not None
            return self._plain(weight)
        joined = form.joined(buffer, unit)
        assert joined is not None
        return int8_matrix(coding, joined[1], self._dtype)

    def _plain(self, weight: Tensor) -> PlainMatrix:
        if self._is_copied:
            weight = private(weight.numel(), self._dtype).view(weight.shape).copy_(weight)
        return PlainMatrix(weight)
