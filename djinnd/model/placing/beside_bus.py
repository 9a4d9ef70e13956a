"""CPU beside the bus: while streamed blocks pass through the ring, the host's cores compute the MLPs of some of them.

In a step of few rows these MLPs do not cross the bus (Ring, `left_out`); two copies of the rows do. Steps of more rows,
and steps with adapters, bring whole blocks. A load, or a move of blocks, measures how fast the host multiplies while
the bus is busy, and chooses how many MLPs the host takes (beside_plan.py).

The host multiplies plain weights. Where the arena has them, it reads the arena. MLPs of packed blocks are decoded once
to private memory: their packed form stays in the arena for steps of many rows, and for other plans.
"""

from __future__ import annotations

import math
import mmap
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from djinn_client.handover.packed import PackedForm
from djinn_client.transport.host_memory import available
from djinnd.device import Device
from djinnd.model.placing.beside_plan import BesideRates, Streamed, best_share, most_rows
from djinnd.model.placing.host_mlp import Cores, Crossing, HostMlp, host_mlp_of
from djinnd.model.placing.projections import Product
from djinnd.model.placing.stored_form import decode_all
from djinnd.model.tuning import BESIDE_COPIES_S, BESIDE_MEMORY, BESIDE_ROWS, BESIDE_RUNS
from djinnd.weights.layout import Layout
from djinnd.weights.plan import PlacementPlan, spread
from djinnd.weights.ring import PIECE
from djinnd.weights.store import WeightStore

Copies = Mapping[int, tuple[Tensor, Tensor]]  # streamed block → (target, source) of its copy over the bus


class BesideBus:
    """The MLPs of one model that the host computes. Used by the thread that uses the model's placement."""

    def __init__(
        self,
        device: Device,
        store: WeightStore,
        dtype: torch.dtype,
        blocks: Sequence[nn.Module],
        products: Sequence[Sequence[Product]],
    ) -> None:
        self._device = device
        self._store = store
        self._dtype = dtype
        found = [self._mlp_of(index, *both) for index, both in enumerate(zip(blocks, products, strict=True))]
        self._mlps = {index: mlp for index, mlp in enumerate(found) if mlp is not None}
        self._rates: BesideRates | None = None
        self.most_rows = 0  # of a step for which the host computes
        self.saved_bytes = 0  # that do not cross the bus in such a step
        self.notes: list[str] = []

    def _mlp_of(self, index: int, block: nn.Module, products: Sequence[Product]) -> HostMlp | None:
        form, layout = self._store.forms[index], self._store.buffers[index].layout
        if index in self._store.experts or not (form is None or isinstance(form, PackedForm)):
            return None
        mlp = host_mlp_of(block, layout, products, self._dtype)
        is_packed = mlp is not None and set(mlp.units) <= set(layout.large)
        return mlp if form is None or is_packed else None

    def install(self, blocks: Sequence[nn.Module]) -> None:
        """Comes after the blocks' modules have been replaced by faster ones."""
        for index, mlp in self._mlps.items():
            mlp.install(blocks[index])

    def takes(self, rows: int, *, adapters: bool) -> bool:
        """Returns True if the host computes its share of a step of so many rows."""
        return rows <= self.most_rows and not adapters

    def arrived(self, block: int, *, whole: bool) -> None:
        """The block is the next one to be computed, and has come whole or without its MLP."""
        if block in self._mlps:
            self._mlps[block].is_due = not whole

    def reset(self) -> None:
        """Begins with the first block again, after a pass that was broken off."""
        for mlp in self._mlps.values():
            mlp.is_due = False

    def units_beside(self, block: int) -> list[int] | None:
        """The numbers of the large matrices that came with the block, if it came without its MLP; else None."""
        mlp, layout = self._mlps.get(block), self._store.buffers[block].layout
        if mlp is None or not mlp.is_due:
            return None
        return [number for number, unit in enumerate(layout.large) if unit not in mlp.units]

    # --- the share of the host --------------------------------------------------------------------------------------

    def choose(self, plan: PlacementPlan, copies: Copies, scratch: Tensor | None) -> dict[int, list[range]]:
        """Chooses the MLPs that the host computes, and prepares their weights. → the elements of these blocks that do
        not cross the bus then. The ring's memory and `scratch` hold nothing yet."""
        self.drop()
        candidates = [index for index in copies if index in self._mlps]
        if not candidates:
            self.notes = ["CPU beside the bus: not used, as no streamed block has a gated MLP in 16 or 32 bits"]
            return {}
        first = candidates[0]
        most = min(len(candidates), self._most_copies(first))
        if not most:
            self.notes = ["CPU beside the bus: not used, as the host has no memory for an MLP's decoded weights"]
            return {}
        own = self._mlps[first].units
        width = self._store.buffers[first].layout.entries[own[1][0]].shape[0]
        crossing = Crossing(self._device, max(BESIDE_ROWS), width, self._dtype)
        self._bind(first, copies[first], scratch, crossing)
        if self._rates is None:
            self._rates = measured(self._device, self._mlps[first], copies[first], width, self._dtype)
        streamed = self._streamed(plan, first, copies)
        count = best_share(streamed, self._rates, most)
        chosen = [candidates[k] for k in spread(count, len(candidates))] if count else []
        if first not in chosen:
            self._mlps[first].unbind()
        for index in chosen:
            if not self._mlps[index].is_bound:
                self._bind(index, copies[index], scratch, crossing)
        self.most_rows = most_rows(streamed, self._rates, count) if count else 0
        left_out = {index: self._left_out(index) for index in chosen}
        self.saved_bytes = sum(_bytes_of(spans, copies[index][1]) for index, spans in left_out.items())
        self.notes = [self._told(count, len(copies), self._plain_bytes(first))]
        return left_out

    def _told(self, count: int, streamed: int, nbytes: int) -> str:
        assert self._rates is not None
        rate = f"it multiplies at {nbytes / self._rates.mlp_s[1] / 1e9:.3g} GB/s, the bus brings "
        if not count:
            return f"CPU beside the bus: not used, as the host would not help: {rate}{self._rates.bus / 1e9:.3g}"
        what = f"the MLPs of {count} of {streamed} streamed blocks in steps of up to {self.most_rows} rows"
        return f"CPU beside the bus: the host computes {what}: {rate}{self._rates.bus_beside / 1e9:.3g} beside it"

    def _streamed(self, plan: PlacementPlan, block: int, copies: Copies) -> Streamed:
        """The device's time is that of reading all weights."""
        device_s = sum(size.needed(1).plain for size in plan.sizes) / self._device.rates().reading
        return Streamed(plan.passing_bytes, _bytes_of(self._left_out(block), copies[block][1]), device_s)

    def _left_out(self, block: int) -> list[range]:
        """The elements of the block's host buffer that only its MLP needs, in order."""
        form, layout = self._store.forms[block], self._store.buffers[block].layout
        units = sorted(self._mlps[block].units, key=lambda unit: layout.entries[unit[0]].offset)
        if form is None:
            return [range(layout.entries[unit[0]].offset, layout.entries[unit[-1]].end) for unit in units]
        assert isinstance(form, PackedForm)
        packed = [form.units[layout.large.index(unit)] for unit in units]
        rests = [range(form.sm_at + unit.offset, form.sm_at + unit.offset + unit.numel) for unit in packed]
        at = form.nibbles_at
        return rests + [range(at + unit.offset // 2, at + (unit.offset + unit.numel) // 2) for unit in packed]

    # --- weights on the host ----------------------------------------------------------------------------------------

    def _plain_bytes(self, block: int) -> int:
        layout = self._store.buffers[block].layout
        shapes = (layout.unit_shape(unit) for unit in self._mlps[block].units)
        return sum(map(math.prod, shapes)) * self._dtype.itemsize

    def _most_copies(self, block: int) -> int:
        """The most MLPs that the host's memory has room for."""
        free = available()
        if self._is_in_arena(block) or free is None:
            return len(self._mlps)
        return int(BESIDE_MEMORY * free) // self._plain_bytes(block)

    def _is_in_arena(self, block: int) -> bool:
        return self._store.forms[block] is None and self._store.dtype == self._dtype

    def _bind(self, block: int, copy: tuple[Tensor, Tensor], scratch: Tensor | None, crossing: Crossing) -> None:
        mlp, layout = self._mlps[block], self._store.buffers[block].layout
        with self._device.side_stream(), torch.inference_mode():
            plain = self._plain(block, layout, copy, scratch)
            matrices = [layout.joined(plain, unit) for unit in mlp.units]
            if not self._is_in_arena(block):
                matrices = [_copied(matrix, self._dtype) for matrix in matrices]
        mlp.bind(matrices[0], matrices[1], crossing)

    def _plain(self, block: int, layout: Layout, copy: tuple[Tensor, Tensor], scratch: Tensor | None) -> Tensor:
        """The plain buffer of the block: in the arena, or decoded to scratch by the device."""
        form = self._store.forms[block]
        if form is None:
            return self._store.host(block)
        assert scratch is not None
        target, source = copy
        target.copy_(source, non_blocking=True)
        plain = scratch[: layout.numel]
        region = target.as_strided((form.nbytes,), (1,))  # the ring has room for all patches
        decode_all(form, region, plain)
        return plain

    def drop(self) -> None:
        """Drops all memory of the host's share."""
        for mlp in self._mlps.values():
            mlp.unbind()
        self.most_rows = self.saved_bytes = 0
        self.notes = []


def _bytes_of(spans: Iterable[range], source: Tensor) -> int:
    return sum(map(len, spans)) * source.element_size()


def _copied(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """A copy in private host memory. Large pages let a core read it with fewer misses of its address tables."""
    memory = mmap.mmap(-1, matrix.numel() * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with suppress(OSError):  # of a kernel without large pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(matrix.shape).copy_(matrix)


@torch.inference_mode()
def measured(device: Device, mlp: HostMlp, copy: tuple[Tensor, Tensor], width: int, dtype: torch.dtype) -> BesideRates:
    """Rates of the bus and of the host's products, each while the other one works. copy: over the bus, for load."""
    Cores(device).use()
    target, source = copy
    inputs = torch.randn(max(BESIDE_ROWS), width, dtype=torch.float32).to(dtype)

    def seconds(rows: int) -> float:
        began = time.perf_counter()
        mlp.multiply(inputs[:rows])
        return time.perf_counter() - began

    bus = device.rates().bus
    alone = min(seconds(rows) for rows in (1, 1, max(BESIDE_ROWS)))
    # The copies go on for twice the time that all products take if more rows take no longer than one. They are bounded,
    # as copies of models that are served wait for them.
    seconds_of_copies = min(2 * len(BESIDE_ROWS) * BESIDE_RUNS * alone, BESIDE_COPIES_S)
    times = 2 + int(seconds_of_copies * bus / source.nbytes)
    items = max(1, PIECE // source.element_size())
    pieces = [*zip(target.split(items), source.split(items), strict=True)] * times
    began = time.perf_counter()
    events = [device.copy(to, of, name="measurement") for to, of in pieces]
    mlp_s, beside = dict[int, float](), bus
    for rows in BESIDE_ROWS:
        mlp_s[rows] = min(seconds(rows) for _ in range(BESIDE_RUNS))
        passed = [event.has_passed() for event in events]
        if any(passed) and not all(passed):
            copied = sum(of.nbytes for (_, of), is_there in zip(pieces, passed, strict=True) if is_there)
            beside = copied / (time.perf_counter() - began)
    for event in events:
        event.wait()
    return BesideRates(bus, min(beside, bus), mlp_s)
