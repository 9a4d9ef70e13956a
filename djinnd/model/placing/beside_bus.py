"""CPU beside the bus: while streamed blocks pass through the ring, the host's cores compute the MLPs of some of them.

In a step of few rows these MLPs do not cross the bus (Ring, `left_out`); two copies of the rows do. Steps of more rows,
and steps with adapters, bring whole blocks. A load, or a move of blocks, measures how fast the host multiplies while
the bus is busy, and chooses how many MLPs the host takes (beside_plan.py).

The host multiplies by plain weights and by int8 codes, in the arena where it can. Of other forms it makes copies once
in private memory (host_weights.py). The arena keeps its form for steps of many rows, and for other plans.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import cycle

import torch
from torch import Tensor, nn

from djinn_client.handover.packed import PackedForm
from djinn_client.transport.host_memory import available
from djinnd.device import Device
from djinnd.model.placing.beside_plan import BesideRates, Streamed, best_share, most_rows
from djinnd.model.placing.host_mlp import Cores, Crossing, HostMlp, host_mlp_of
from djinnd.model.placing.host_weights import HostWeights
from djinnd.model.placing.projections import Product
from djinnd.model.placing.stored_form import decode_all
from djinnd.model.tuning import BESIDE_COPIES_S, BESIDE_MEMORY, BESIDE_ROWS, BESIDE_RUNS, BESIDE_SAMPLES, BESIDE_SLOW_S
from djinnd.weights.plan import PlacementPlan, spread
from djinnd.weights.ring import PIECE
from djinnd.weights.store import WeightStore

Copies = Mapping[int, tuple[Tensor, Tensor]]  # streamed block → (target, source) of its copy over the bus

FORMS = "16 or 32 bits, or in int8"  # of matrices by which the host multiplies


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
        self._mlps: dict[int, HostMlp] = {}
        self._weights: dict[int, HostWeights] = {}  # of the same blocks
        for index, (block, own) in enumerate(zip(blocks, products, strict=True)):
            self._find(index, block, own)
        self._rates: BesideRates | None = None
        self.most_rows = 0  # of a step for which the host computes
        self.saved_bytes = 0  # that do not cross the bus in such a step
        self.notes: list[str] = []

    def _find(self, index: int, block: nn.Module, products: Sequence[Product]) -> None:
        """Keeps the block's MLP if the host can compute it."""
        form, layout = self._store.forms[index], self._store.buffers[index].layout
        mlp = None if index in self._store.experts else host_mlp_of(block, layout, products, self._dtype)
        if mlp is None:
            return
        weights = HostWeights(form, layout, mlp.units, self._store.dtype, self._dtype)
        if weights.are_multiplied:
            self._mlps[index], self._weights[index] = mlp, weights

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

    def missing(self, block: int) -> Sequence[tuple[str, ...]]:
        """The units that have not come with the block, because the host multiplies by them in this pass."""
        mlp = self._mlps.get(block)
        return mlp.units if mlp is not None and mlp.is_due else ()

    # --- the share of the host --------------------------------------------------------------------------------------

    def choose(self, plan: PlacementPlan, copies: Copies, scratch: Tensor | None) -> dict[int, list[range]]:
        """Chooses the MLPs that the host computes, and prepares their weights. → the elements of these blocks that do
        not cross the bus then. The ring's memory and `scratch` hold nothing yet."""
        self.drop()
        candidates = [index for index in copies if index in self._mlps]
        if not candidates:
            self.notes = [f"CPU beside the bus: not used, as no streamed block has a gated MLP in {FORMS}"]
            return {}
        middle = candidates[len(candidates) // 2 :]  # the first and last blocks may have other forms
        sample = middle[0]
        most = self._most_copies(candidates)
        if not most:
            self.notes = ["CPU beside the bus: not used, as the host has no memory for a copy of an MLP's weights"]
            return {}
        own = self._mlps[sample].units
        width = self._store.buffers[sample].layout.entries[own[1][0]].shape[0]
        crossing = Crossing(self._device, max(BESIDE_ROWS), width, self._dtype)
        if self._rates is None:
            samples = middle[: min(BESIDE_SAMPLES, most)]
            for index in samples:
                self._bind(index, copies[index], scratch, crossing)
            mlps = [self._mlps[index] for index in samples]
            self._rates = measured(self._device, mlps, copies[sample], width, self._dtype)
        streamed = self._streamed(plan, sample, copies)
        count = best_share(streamed, self._rates, most)
        chosen = [candidates[k] for k in spread(count, len(candidates))] if count else []
        for index in candidates:
            if index not in chosen:
                self._mlps[index].unbind()
        for index in chosen:
            if not self._mlps[index].is_bound:
                self._bind(index, copies[index], scratch, crossing)
        self.most_rows = most_rows(streamed, self._rates, count) if count else 0
        left_out = {index: self._weights[index].spans() for index in chosen}
        self.saved_bytes = sum(_bytes_of(spans, copies[index][1]) for index, spans in left_out.items())
        self.notes = [self._told(count, len(copies), self._weights[sample].nbytes)]
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
        return Streamed(plan.passing_bytes, _bytes_of(self._weights[block].spans(), copies[block][1]), device_s)

    # --- weights on the host ----------------------------------------------------------------------------------------

    def _most_copies(self, blocks: Sequence[int]) -> int:
        """→ how many of these blocks' MLPs the host has memory to copy; all of them if none is copied."""
        free, each = available(), max(self._weights[block].copied_bytes for block in blocks)
        return len(blocks) if not each or free is None else min(len(blocks), int(BESIDE_MEMORY * free) // each)

    def _bind(self, block: int, copy: tuple[Tensor, Tensor], scratch: Tensor | None, crossing: Crossing) -> None:
        form = self._store.forms[block]
        with self._device.side_stream(), torch.inference_mode():
            buffer = self._store.host(block)
            if isinstance(form, PackedForm):
                buffer = self._decoded(form, copy, scratch)
            gate_up, down = self._weights[block].matrices(buffer)
        self._mlps[block].bind(gate_up, down, crossing)

    def _decoded(self, form: PackedForm, copy: tuple[Tensor, Tensor], scratch: Tensor | None) -> Tensor:
        """The plain buffer of a packed block, decoded to scratch by the device."""
        assert scratch is not None
        target, source = copy
        target.copy_(source, non_blocking=True)
        plain = scratch[: form.numel]
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


@torch.inference_mode()
def measured(
    device: Device, mlps: Sequence[HostMlp], copy: tuple[Tensor, Tensor], width: int, dtype: torch.dtype
) -> BesideRates:
    """Rates of the bus and of the host's products, each while the other one works. mlps: of one size; they are
    multiplied by in turns. copy: over the bus, for load."""
    Cores(device).use()
    target, source = copy
    inputs = torch.randn(max(BESIDE_ROWS), width, dtype=torch.float32).to(dtype)
    turns = cycle(mlps)

    def seconds(rows: int) -> float:
        began = time.perf_counter()
        next(turns).multiply(inputs[:rows])
        return time.perf_counter() - began

    bus = device.rates().bus
    alone = min(seconds(1) for _ in range(2))
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
        mlp_s[rows] = statistics.median(seconds(rows) for _ in range(BESIDE_RUNS))
        passed = [event.has_passed() for event in events]
        if any(passed) and not all(passed):
            copied = sum(of.nbytes for (_, of), is_there in zip(pieces, passed, strict=True) if is_there)
            beside = copied / (time.perf_counter() - began)
        if mlp_s[rows] > BESIDE_SLOW_S:  # a load would wait long for measurements of more rows
            break
    for event in events:
        event.wait()
    return BesideRates(bus, min(beside, bus), mlp_s)
