"""Layout: the places of a block's tensors in its flat buffer.

    ┌────────────┬───────────────────────────────┬─────┬────────────┬─────┬──────────┬─────┬───────┬─────
    │ q_proj     │ k_proj     │ v_proj           │ pad │ o_proj     │ …   │ router   │ …   │ norms │ biases …
    └────────────┴───────────────────────────────┴─────┴────────────┴─────┴──────────┴─────┴───────┴─────
    ▲ ALIGNMENT   a run: no pad inside            ▲ ALIGNMENT              ▲ small matrices ▲ vectors

Tensors are row-major, in one dtype. Vectors have one dimension or none. A run is a group of tensors that one matrix
product can serve: q, k and v, or gate and up. They are adjacent, without padding, so that their concatenation is a view
of the buffer. The large matrices come first, because only they are packed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

ALIGNMENT = 256  # bytes; the alignment of device allocators, and more than any vector load needs

STEP = ALIGNMENT // 2  # elements; at least ALIGNMENT bytes for two- and four-byte dtypes

# A matrix is small if it has fewer numbers than both. Packed, it would save half a byte a number: 0.5 MB, which an H200
# reads in 0.15 µs. If no product reads it packed, such as a router's, unpacking it takes a launch of about 3 µs in
# every step. Where all matrices of a model are small, the second bound lets the larger ones be packed.
SMALL_NUMBERS = 1 << 20
SMALL_SHARE = 1 / 16  # of the largest matrix

_RUNS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass(frozen=True, slots=True)
class LayoutEntry:
    """One tensor of a buffer. `offset` counts elements, so that one layout serves every dtype."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


class Layout:
    """Entries, runs and units of a block's flat buffer. Offsets count elements."""

    def __init__(self, shapes: Iterable[tuple[str, Sequence[int]]]) -> None:
        self.entries: dict[str, LayoutEntry] = {}
        self.runs: list[tuple[str, ...]] = []
        self.units: list[tuple[str, ...]] = []  # the matrices: each run, and each matrix that is in no run
        self.large: list[tuple[str, ...]] = []  # the units that are worth packing: the first ones
        self.matrices = 0  # elements of all matrices, including the padding after the last one
        offset = 0
        runs = list(_runs({name: tuple(shape) for name, shape in shapes}))
        largest = max((_numel(run) for run in runs if not _is_vector(run)), default=0)
        least = min(SMALL_NUMBERS, largest * SMALL_SHARE)
        for run in sorted(runs, key=lambda run: (_is_vector(run), _numel(run) < least)):
            names = tuple(name for name, _ in run)
            for name, shape in run:
                self.entries[name] = LayoutEntry(name, shape, offset)
                offset = self.entries[name].end
            offset = -(-offset // STEP) * STEP
            if len(run) > 1:
                self.runs.append(names)
            if not _is_vector(run):
                self.units.append(names)
                self.matrices = offset
                if _numel(run) >= least:
                    self.large.append(names)
        self.numel = offset

    def nbytes(self, dtype: torch.dtype) -> int:
        return self.numel * dtype.itemsize

    def views(self, buffer: Tensor) -> dict[str, Tensor]:
        """name → view of the tensor, for a buffer of `numel` elements."""
        assert buffer.numel() == self.numel, (buffer.numel(), self.numel)
        return {e.name: buffer[e.offset : e.end].view(e.shape) for e in self.entries.values()}

    def views_of_end(self, end: Tensor) -> dict[str, Tensor]:
        """name → view of each tensor that is in the end of a buffer, for memory that holds only this end: [n]. It
        begins with a tensor."""
        start = self.numel - len(end)
        own = [entry for entry in self.entries.values() if entry.offset >= start]
        return {e.name: end[e.offset - start : e.end - start].view(e.shape) for e in own}

    def joined(self, buffer: Tensor, run: tuple[str, ...]) -> Tensor:
        """The tensors of a run as one view, concatenated along their first dimension. buffer: [numel], or only an end
        of it that has the run."""
        start = self.numel - len(buffer)
        entries = [self.entries[name] for name in run]
        assert entries[0].offset >= start, (run, start)
        rows = sum(e.shape[0] for e in entries)
        return buffer[entries[0].offset - start : entries[-1].end - start].view(rows, *entries[0].shape[1:])

    def unit_shape(self, unit: tuple[str, ...]) -> tuple[int, int]:
        """Rows and columns of a unit as one matrix. Stacked experts are concatenated along the rows."""
        shapes = [self.entries[name].shape for name in unit]
        return sum(math.prod(shape[:-1]) for shape in shapes), shapes[0][-1]


def _numel(run: list[tuple[str, tuple[int, ...]]]) -> int:
    return sum(math.prod(shape) for _, shape in run)


def _is_vector(run: list[tuple[str, tuple[int, ...]]]) -> bool:
    return len(run[0][1]) < 2


def _runs(shapes: dict[str, tuple[int, ...]]) -> Iterable[list[tuple[str, tuple[int, ...]]]]:
    """Groups the tensors into runs: modules of one parent that share their input. Each other tensor is a run of its
    own."""
    taken: set[str] = set()
    for name in shapes:
        if name in taken:
            continue
        run = next((run for run in _candidates(name) if all(n in shapes and n not in taken for n in run)), [name])
        if any(shapes[n][1:] != shapes[run[0]][1:] for n in run):
            run = [name]
        taken.update(run)
        yield [(n, shapes[n]) for n in run]


def _candidates(name: str) -> Iterable[list[str]]:
    """The runs that a tensor of this name may belong to."""
    parts = name.split(".")
    if len(parts) < 2:
        return
    *parent, module, leaf = parts
    for group in _RUNS:
        if module in group:
            yield [".".join((*parent, m, leaf)) for m in group]
