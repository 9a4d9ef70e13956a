"""CodedForm: a buffer that keeps its matrices in the codes of the checkpoint.

    ┌─────────┬───────────────┬────────────────┬────────────────────────┬─────
    │ vectors │ q_proj: codes │ q_proj: scales │ a unit without a code  │ …       each 256-byte aligned
    └─────────┴───────────────┴────────────────┴────────────────────────┴─────

Vectors and units without a code are in the dtype of computing, so modules read them in place. A unit (q, k and v, say)
in which any matrix has a code is decoded to the plain buffer, to its places in the Layout. If all matrices of a unit
have the same code, and its parts can be divided by their rows, each part of the unit is one region: q's codes, k's
and v's, then the scales of all three. Products of few rows then read the unit as one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from djinnd.weights.forms.coding import Coding
from djinnd.weights.layout import ALIGNMENT, Layout

_OF_LOADS = 16  # bytes: kernels load as many at once, and are compiled for parts that begin at a multiple


@dataclass(frozen=True, slots=True)
class Code:
    """The code of one parameter, a matrix or a stack of matrices. With `is_transposed`, the coded matrices are the
    parameter's transposed ones."""

    coding: Coding
    is_transposed: bool = False

    def matrices(self, parameter: Tensor) -> Tensor:
        """A view [stack, rows, cols] of the parameter, as its code has it."""
        stack = parameter.view(-1, *parameter.shape[-2:])
        return stack.transpose(1, 2) if self.is_transposed else stack

    def stack_shape(self, shape: Sequence[int]) -> tuple[int, int, int]:
        """Matrices, rows and columns of the code of a parameter of this shape."""
        rows, cols = reversed(shape[-2:]) if self.is_transposed else shape[-2:]
        return math.prod(shape[:-2]), rows, cols


Decoder = Callable[[Coding, Sequence[Tensor], Tensor], None]  # like Coding.decode


class Coded(NamedTuple):
    """A parameter that the checkpoint stores in a code. `fill` writes its parts, [stack, *Part.shape] each; any thread
    may call it."""

    code: Code
    fill: Callable[[Sequence[Tensor]], None]


@dataclass(frozen=True, slots=True)
class _Region:
    """Bytes of the buffer that are one tensor."""

    start: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def end(self) -> int:
        return self.start + math.prod(self.shape) * self.dtype.itemsize

    def of(self, stored: Tensor) -> Tensor:
        return stored[self.start : self.end].view(self.dtype).view(self.shape)


class CodedForm:
    """Where things are in the stored form of a buffer. `stored`: uint8 [nbytes], on the host or a device."""

    def __init__(self, layout: Layout, codes: Mapping[str, Code], dtype: torch.dtype) -> None:
        """codes: of parameters, by their names in the layout. dtype: of all others."""
        self.layout = layout
        self.codes = dict(codes)
        self.dtype = dtype
        self.numel = layout.numel
        self._end = 0
        self._vectors = self._place((layout.numel - layout.matrices,), dtype)
        self._parts: dict[str, tuple[_Region, ...]] = {}
        self._joined: dict[tuple[str, ...], tuple[_Region, ...]] = {}  # units that are one coded matrix
        self._alone: dict[str, _Region] = {}  # matrices without a code, in a unit with one
        self._plain: dict[tuple[str, ...], _Region] = {}  # units without a code
        for unit in layout.units:
            if not any(name in self.codes for name in unit):
                self._plain[unit] = self._place(layout.unit_shape(unit), dtype)
                continue
            if (code := self._code_of(unit)) is not None:
                self._place_joined(unit, code.coding)
                continue
            for name in unit:
                shape = layout.entries[name].shape
                if name in self.codes:
                    count, rows, cols = self.codes[name].stack_shape(shape)
                    parts = self.codes[name].coding.parts(rows, cols)
                    self._parts[name] = tuple(self._place((count, *part.shape), part.dtype) for part in parts)
                else:
                    self._alone[name] = self._place(shape, dtype)
        self.nbytes = self._end

    def _place(self, shape: tuple[int, ...], dtype: torch.dtype) -> _Region:
        region = _Region(self._end, shape, dtype)
        self._end = -(-region.end // ALIGNMENT) * ALIGNMENT
        return region

    def _code_of(self, unit: tuple[str, ...]) -> Code | None:
        """The code in which the matrices of the unit are one matrix; None if they are stored one by one."""
        codes = {self.codes.get(name) for name in unit}
        code = codes.pop()
        if codes or code is None or code.is_transposed:
            return None
        shapes = [self.layout.entries[name].shape for name in unit]
        if any(len(shape) != 2 for shape in shapes):
            return None
        whole = code.coding.parts(*self.layout.unit_shape(unit))
        own = [code.coding.parts(*shape) for shape in shapes]
        for parts, of_unit in zip(zip(*own, strict=True), whole, strict=True):
            is_divided = {part.step for part in parts} == {of_unit.step} and all(
                shape[0] % of_unit.step == 0 for shape in shapes[:-1]
            )
            if not is_divided or any(part.nbytes % _OF_LOADS for part in parts):
                return None
        return code

    def _place_joined(self, unit: tuple[str, ...], coding: Coding) -> None:
        whole = coding.parts(*self.layout.unit_shape(unit))
        regions = self._joined[unit] = tuple(self._place((1, *part.shape), part.dtype) for part in whole)
        starts = [region.start for region in regions]
        for name in unit:
            parts = coding.parts(*self.layout.entries[name].shape)
            self._parts[name] = tuple(
                _Region(start, (1, *part.shape), part.dtype) for start, part in zip(starts, parts, strict=True)
            )
            starts = [region.end for region in self._parts[name]]

    @property
    def places(self) -> str:
        """Where each tensor begins. Buffers of equal layouts and places have their bytes in the same order."""
        regions = [self._vectors, *self._plain.values(), *self._alone.values()]
        regions += [region for parts in self._parts.values() for region in parts]
        return " ".join(str(region.start) for region in regions)

    def coding_of(self, unit: tuple[str, ...]) -> Coding | None:
        """The coding of a unit that is one coded matrix; None if it is none."""
        return self.codes[unit[0]].coding if unit in self._joined else None

    def is_plain(self, unit: tuple[str, ...]) -> bool:
        """True if none of the unit's matrices has a code."""
        return unit in self._plain

    def span(self, unit: tuple[str, ...]) -> range:
        """The bytes of a unit that is plain or one coded matrix. Nothing else is in them."""
        regions = [self._plain[unit]] if self.is_plain(unit) else self._joined[unit]
        return range(regions[0].start, regions[-1].end)

    @property
    def names(self) -> list[str]:
        """The codes' names, each once, in the order of the layout."""
        return list(dict.fromkeys(self.codes[name].coding.name for name in self._parts))

    def used(self, stored: Tensor) -> int:
        """→ the bytes that have to travel: all."""
        return self.nbytes

    # --- views ------------------------------------------------------------------------------------------------------

    def vectors_view(self, stored: Tensor) -> Tensor:
        """[numel - matrices], as Layout.views_of_end takes it."""
        return self._vectors.of(stored)

    def parts(self, stored: Tensor, name: str) -> tuple[Tensor, ...]:
        """The parts of a parameter with a code: [stack, *Part.shape] each."""
        return tuple(region.of(stored) for region in self._parts[name])

    def joined(self, stored: Tensor, unit: tuple[str, ...]) -> tuple[Code, tuple[Tensor, ...]] | None:
        """The code of a unit that is one coded matrix, and its parts, [1, *Part.shape] each. None if it is none."""
        if unit not in self._joined:
            return None
        return self.codes[unit[0]], tuple(region.of(stored) for region in self._joined[unit])

    def plain_unit(self, stored: Tensor, unit: tuple[str, ...]) -> Tensor | None:
        """The unit's matrices as one matrix [rows, cols]; None if one of them has a code."""
        return self._plain[unit].of(stored) if unit in self._plain else None

    def alone(self, stored: Tensor, name: str) -> Tensor:
        """A matrix without a code in a unit that has one."""
        return self._alone[name].of(stored)

    def plain(self, stored: Tensor) -> dict[str, Tensor]:
        """Every parameter without a code, as a view."""
        found = self.layout.views_of_end(self.vectors_view(stored))
        for unit, region in self._plain.items():
            rest, sizes = region.of(stored).view(-1), [self.layout.entries[name].numel for name in unit]
            for name, own in zip(unit, rest.split(sizes), strict=True):
                found[name] = own.view(self.layout.entries[name].shape)
        return found | {name: region.of(stored) for name, region in self._alone.items()}

    def stacks(self, stored: Tensor) -> list[Tensor]:
        """All tensors of a buffer of stacked experts, [experts, …] each: parts of codes, and stacks without a code."""
        parts = [region.of(stored) for regions in self._parts.values() for region in regions]
        return [*parts, *(self.plain(stored)[name] for name in self.layout.entries if name not in self.codes)]

    # --- bytes ------------------------------------------------------------------------------------------------------

    def clear(self, stored: Tensor) -> None:
        """Zeroes the vectors, and the bytes between the parts, so that equal buffers have equal bytes and nothing older
        is kept. Comes before the buffer is filled."""
        regions = [self._vectors, *self._plain.values(), *self._alone.values()]
        regions += [region for parts in self._parts.values() for region in parts]
        places = sorted((region.start, region.end) for region in regions)
        for (_, end), (start, _) in zip(places, [*places[1:], (self.nbytes, 0)], strict=True):
            stored[end:start].zero_()
        self.vectors_view(stored).zero_()

    def filling(
        self, stored: Tensor, coded: Mapping[str, Coded], recipes: Mapping[str, Callable[[Tensor], None]]
    ) -> list[Callable[[], None]]:
        """Calls that fill the buffer, one for each parameter, in any order and from any threads."""
        codes = [partial(coded[name].fill, self.parts(stored, name)) for name in self._parts]
        return [*codes, *(partial(recipes[name], view) for name, view in self.plain(stored).items())]

    def decode(self, stored: Tensor, out: Tensor, by: Decoder = Coding.decode, missing: Container[str] = ()) -> None:
        """Writes the units with codes to their places in the plain buffer: [numel], any float dtype, same device. `by`
        decodes a parameter. missing: parameters that are not in `stored`."""
        for name, code in self.codes.items():
            if name not in missing:
                by(code.coding, self.parts(stored, name), code.matrices(self.place(out, name)))
        for name, region in self._alone.items():
            self.place(out, name).copy_(region.of(stored))

    def unpack(self, stored: Tensor, out: Tensor) -> None:
        """Writes the whole plain buffer: [numel], any float dtype, same device."""
        self.decode(stored, out)
        for name, view in self.plain(stored).items():
            if name not in self._alone:
                self.place(out, name).copy_(view)

    def unpack_expert(self, stored: Tensor, name: str, expert: int, out: Tensor) -> None:
        """Writes one matrix of a stack: the parameter's [expert], to `out`."""
        if name not in self._parts:
            out.copy_(self.plain(stored)[name][expert])
            return
        code = self.codes[name]
        code.coding.decode([part[expert : expert + 1] for part in self.parts(stored, name)], code.matrices(out))

    def place(self, out: Tensor, name: str) -> Tensor:
        """The place of a parameter in the plain buffer, as a view."""
        entry = self.layout.entries[name]
        return out[entry.offset : entry.end].view(entry.shape)
