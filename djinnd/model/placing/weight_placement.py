"""Where the weights of each block are on the device, and the ring that streams blocks from host memory.

    place      device memory of its own   the block computes from
    plain      flat buffer                that buffer
    packed     buffer in a stored form    scratch, decoded just before; products of few rows read the stored form
    streamed   none                       its region of the ring, or scratch, decoded just before, if it has a form

Stacked experts of packed and streamed blocks are handled apart: the experts that the router has picked are fetched into
the scratch buffer, behind the block's own weights (model/family/experts.py). The ring carries a streamed block without
them. Resident experts are not fetched where the plan has no scratch for them: kernels multiply by their codes.

A pass over the blocks calls, for each block in order, either `begin`, `prepare`, the module and `end`, or `skip`.
`prepare` queues only kernels over fixed addresses, so a captured graph may hold it. The other calls order copies, and
stay outside of graphs.

The host may compute a part of some streamed blocks itself, in passes of few rows: see beside_bus.py. Such a block is
not replayed from a graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from djinn_client.protocol import Placing
from djinnd.device import Device, Pinning
from djinnd.model.family.experts import Experts, StepTokens
from djinnd.model.placing.beside_bus import BesideBus
from djinnd.model.placing.placed_block import PlacedBlock
from djinnd.model.placing.projections import Product
from djinnd.model.placing.stored_form import decode_all
from djinnd.weights.plan import BlockPlace, PlacementPlan, aligned
from djinnd.weights.ring import PIECE, Ring, place_regions
from djinnd.weights.store import WeightStore

Progress = Callable[[int, int], None]  # bytes copied to the device, bytes in all


class WeightPlacement:
    """Owns the device memory of a model's blocks. One thread at a time uses it: the loader's during the load, then the
    engine's."""

    def __init__(
        self,
        name: str,
        device: Device,
        store: WeightStore,
        dtype: torch.dtype,
        blocks: list[nn.Module],
        products: list[list[Product]],
        placing: Placing,
    ) -> None:
        self.plan: PlacementPlan | None = None
        self.tokens = StepTokens()
        self._name = name
        self.device = device
        self._store = store
        self._dtype = dtype
        self._placing = placing
        self._blocks = [
            PlacedBlock(module, store.buffers[i].layout, store.forms[i], products[i], self._experts_of(i, module))
            for i, module in enumerate(blocks)
        ]
        if device.torch_device.type == "cuda":
            self.fuse_experts()
        self.beside = BesideBus(device, store, dtype, blocks, products) if placing.cpu_beside_bus else None
        self._scratch: Tensor | None = None
        self._ring: Ring | None = None
        self._labels: set[str] = set()

    def _experts_of(self, index: int, module: nn.Module) -> Experts | None:
        number = self._store.experts.get(index)
        if number is None:
            return None
        buffer, form = self._store.buffers[number], self._store.forms[number]
        assert buffer.routing is not None
        return Experts(module, buffer.layout, form, buffer.routing, self.tokens, self.device.torch_device)

    def fuse_experts(self) -> None:
        """Installs the kernels for stacked experts. Comes before the blocks have places."""
        from djinnd.model.fast.experts import fused_experts_of  # Triton comes with CUDA builds of torch

        for block in self._blocks:
            if (experts := block.experts) is not None:
                block.fused = fused_experts_of(experts.module, lambda experts=experts: experts.real)  # type: ignore[misc]

    @property
    def turning_rows(self) -> list[int]:
        """The fewest rows for each set of kernels that stacked experts launch."""
        fused = [block.experts for block in self._blocks if block.fused is not None]
        if not fused:
            return []
        from djinnd.model.kernels.experts.forward import turning_rows  # Triton comes with CUDA builds of torch

        routings = {experts.routing for experts in fused if experts is not None}
        return sorted({rows for each in routings for rows in turning_rows(each.picked, each.count)})

    # --- a pass -----------------------------------------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        return self._ring is not None

    def begin_pass(self, rows: int, *, adapters: bool) -> None:
        """Comes before the first block of a pass that the host may take a share of. adapters: some row has one."""
        if self._ring is not None:
            self._ring.begin(short=self.beside is not None and self.beside.takes(rows, adapters=adapters))

    @contextmanager
    def by_the_bus(self) -> Iterator[None]:
        """The host takes no share of passes within the context."""
        beside, self.beside = self.beside, None
        try:
            yield
        finally:
            self.beside = beside

    def begin(self, index: int) -> None:
        """Makes the compute stream wait for the block's weights; its work may be queued afterwards. Raises the error of
        a failed copy."""
        if index >= self.half:
            self.device.catch_up()
        place = self._blocks[index].place
        if self._ring is not None and place is BlockPlace.STREAMED:
            is_whole = self._ring.take()
            if self.beside is not None:
                self.beside.arrived(index, whole=is_whole)
        if (trace := self.device.trace) is not None:
            assert place is not None
            trace.begin("compute", f"block {index}", place=place.value)

    @property
    def half(self) -> int:
        """The first block that waits for the device's expected copies (Device.catch_up). Earlier blocks do not wait for
        them."""
        return len(self._blocks) // 2

    def prepare(self, index: int, rows: int) -> None:
        """Decodes the parts of the block that a batch of `rows` tokens reads in plain form."""
        missing = () if self.beside is None else self.beside.missing(index)
        self._blocks[index].prepare(rows, self._scratch, missing)

    def is_shared(self, index: int) -> bool:
        """True between `begin` and `end` of a block that the host computes a part of."""
        return self.beside is not None and bool(self.beside.missing(index))

    def end(self, index: int) -> None:
        """Ends the block's turn, after all its work has been queued. A streamed block's region of the ring may be
        reused."""
        if (trace := self.device.trace) is not None:
            trace.end("compute")
        if self._ring is not None and self._blocks[index].place is BlockPlace.STREAMED:
            self._ring.give_back()
            if self.beside is not None:
                self.beside.arrived(index, whole=True)

    def skip(self, blocks: range) -> None:
        """Skips these blocks in this pass."""
        if self._ring is not None:
            self._ring.skip(sum(self._blocks[index].place is BlockPlace.STREAMED for index in blocks))

    def restart(self) -> None:
        """Resets the ring to block 0 after a pass that was broken off."""
        if self._ring is not None:
            if self.beside is not None:
                self.beside.reset()
            self._ring.restart()

    def not_finite(self) -> str | None:
        """Name of the first parameter in host memory that holds NaN or infinity; None if there is none or no host copy.
        Reads all weights."""
        return self._store.not_finite() if self._store.is_attached else None

    # --- places -----------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of the device's budget that the blocks take."""
        return 0 if self.plan is None else self.plan.nbytes

    def move(
        self, plan: PlacementPlan, progress: Progress = lambda done, total: None, pinning: Pinning | None = None
    ) -> None:
        """Brings every block to its place in `plan`. No pass may be under way, and graphs captured before are invalid.

        pinning: pinning of the store's pieces that is still under way.

        Raises OutOfMemory, or an exception of `progress`; only `release` may be called after that.
        """
        self.make_room(plan)
        if plan.scratch_bytes:
            # Zeroed because some families multiply all experts, most by a weight of 0, and 0 * NaN would be NaN.
            self._scratch = self._allocate(
                "scratch", plan.scratch_bytes // self._dtype.itemsize, self._dtype, zero=True
            )
        moving = [i for i, place in enumerate(plan.places) if self._blocks[i].place is not place]
        self._bring([i for i in moving if plan.places[i] is not BlockPlace.STREAMED], plan, progress, pinning)
        if pinning is not None:
            pinning.finish()
        for index, block in enumerate(self._blocks):
            block.place = plan.places[index]
            if block.place is BlockPlace.PACKED:
                block.packed = self._parts(index)[0]
        if plan.streamed:
            self._ring = self._make_ring(plan)
        self.plan = plan
        for index, block in enumerate(self._blocks):
            block.bind(self._scratch, self._source_of_experts(index), decodes_experts=plan.decodes_experts_of(index))

    def make_room(self, plan: PlacementPlan) -> None:
        """First part of `move(plan)`, which must follow: frees the ring, scratch, and each block that will move."""
        self.device.synchronize()
        self._drop_streaming()
        for index, place in enumerate(plan.places):
            if self._blocks[index].place is not place:
                self._drop(index)
        self.device.trim()

    def _bring(self, indices: list[int], plan: PlacementPlan, progress: Progress, pinning: Pinning | None) -> None:
        done, total = 0, sum(plan.sizes[i].plain for i in indices)
        staged = [i for i in indices if plan.places[i] is BlockPlace.PLAIN and self._blocks[i].form is not None]
        staging = self._staging(staged)
        for index in indices:
            block, size = self._blocks[index], plan.sizes[index]
            if plan.places[index] is BlockPlace.PACKED:
                block.memory = self._allocate(f"block {index}", size.least, torch.uint8)
            else:
                block.memory = self._allocate(f"block {index}", size.plain // self._dtype.itemsize, self._dtype)
            with self.device.side_stream(), torch.inference_mode():
                for number, target in zip(self._store.parts(index), self._parts(index), strict=True):
                    if pinning is not None:
                        pinning.wait(number)
                    source, form = self._store.travelling(number), self._store.forms[number]
                    if index in staged:
                        assert form is not None and staging is not None
                        staging[: len(source)].copy_(source, non_blocking=True)
                        decode_all(form, staging[: form.nbytes], target)
                    else:
                        target[: len(source)].copy_(source, non_blocking=True)
            done += plan.sizes[index].plain
            progress(done, total)
        del staging
        self._release("staging")

    def _staging(self, staged: list[int]) -> Tensor | None:
        """Memory for the packed form of a block while it is unpacked to its plain place: the scratch buffer if that is
        large enough. None if no block of `staged` needs it."""
        if not staged:
            return None
        forms = [self._store.forms[number] for i in staged for number in self._store.parts(i)]
        largest = max(form.nbytes for form in forms if form is not None)
        if self._scratch is not None and self._scratch.nbytes >= largest:
            return self._scratch.view(torch.uint8)
        return self._allocate("staging", largest, torch.uint8)

    def _parts(self, index: int) -> list[Tensor]:
        """Splits the memory of a resident block into its buffers: the block itself, then its stacked experts if any."""
        memory, numbers = self._blocks[index].memory, self._store.parts(index)
        assert memory is not None
        if memory.dtype == torch.uint8:
            sizes = [form.nbytes for form in (self._store.forms[number] for number in numbers) if form is not None]
        else:
            sizes = [self._store.buffers[number].layout.numel for number in numbers]
        return list(memory.split(sizes))

    def _make_ring(self, plan: PlacementPlan) -> Ring:
        streamed = plan.streamed
        memory = self._allocate("ring", plan.ring_bytes, torch.uint8)
        sizes = [aligned(plan.sizes[i].passing) for i in streamed]
        regions = place_regions(sizes, plan.ring_bytes)
        for index, region in zip(streamed, regions, strict=True):
            block, own = self._blocks[index], memory[region.start : region.end]
            if block.form is None:
                block.memory = own[: block.layout.numel * self._dtype.itemsize].view(self._dtype)
            else:
                block.packed = own[: block.form.nbytes]

        def sources(k: int) -> tuple[Tensor, Tensor]:
            block, source = self._blocks[streamed[k]], self._store.travelling(streamed[k])
            target = block.memory if block.packed is None else block.packed
            assert target is not None
            return target[: len(source)], source

        placing, left_out = self._placing, dict[int, list[range]]()
        if self.beside is not None:
            copies = {index: sources(k) for k, index in enumerate(streamed)}
            left_out = self.beside.choose(plan, copies, self._scratch)
        return Ring(
            self.device,
            memory,
            regions,
            sources,
            prefetch=placing.prefetch,
            piece=placing.piece_bytes or PIECE,
            name=lambda k: f"block {streamed[k]}",
            left_out={streamed.index(index): spans for index, spans in left_out.items()},
        )

    def _source_of_experts(self, index: int) -> Tensor | None:
        """The memory that a block's experts are fetched from: the device for a resident block, the host for a streamed
        one. None if the block has no stacked experts."""
        number = self._store.experts.get(index)
        if number is None:
            return None
        return self._store.host(number) if self._blocks[index].place is BlockPlace.STREAMED else self._parts(index)[1]

    # --- memory -----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """Frees all device memory of the blocks. The modules must not run afterwards."""
        self._drop_streaming()
        for index in range(len(self._blocks)):
            self._drop(index)
        for label in list(self._labels):  # left over from a move that was broken off
            self._release(label)
        self.plan = None

    def _drop_streaming(self) -> None:
        """Frees ring and scratch, and unbinds the modules that compute from them."""
        self._ring = None
        self._scratch = None
        if self.beside is not None:
            self.beside.drop()
        for index, block in enumerate(self._blocks):
            if block.place is BlockPlace.STREAMED:
                self._drop(index)
            elif block.place is BlockPlace.PACKED:
                block.unbind()
        for label in ("ring", "scratch"):
            self._release(label)

    def _drop(self, index: int) -> None:
        block = self._blocks[index]
        block.place = block.memory = block.packed = None
        block.unbind()
        self._release(f"block {index}")

    def _allocate(self, what: str, numel: int, dtype: torch.dtype, *, zero: bool = False) -> Tensor:
        memory = self.device.allocate(f"{what} of {self._name}", (numel,), dtype, zero=zero)
        self._labels.add(what)
        return memory

    def _release(self, what: str) -> None:
        if what in self._labels:
            self._labels.remove(what)
            self.device.release(f"{what} of {self._name}")

    def check_integrity(self) -> None:
        if self._ring is not None:
            self._ring.check_integrity()
