"""The blocks of one model on its device: each in its place, and the streamed ones on their way through the ring.

    place      device memory of its own     computes from
    plain      the flat buffer              its buffer
    packed     the packed buffer            scratch, decoded just before; or its buffer, inside the products of few rows
    streamed   none                         its region of the ring; where that is packed: scratch, decoded just before

Stacked experts of a block that is not plain are no part of this: those that its router has picked are fetched into the
scratch buffer, behind what the block itself has there (model/experts.py). Of a streamed block, only the rest passes.

A pass over the blocks calls, for each in order, `begin`, `prepare`, its module, `end`, or for some of them `pass_over`.
`prepare` only queues kernels over fixed addresses, so a captured graph may hold it; the others order copies and stay
outside.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from djinn_client.protocol import Placing
from djinnd.device import Device, Pinning
from djinnd.model.experts import Experts, StepTokens
from djinnd.model.placed_block import PlacedBlock, unpack
from djinnd.model.projections import Product
from djinnd.weights.plan import Place, Plan, aligned
from djinnd.weights.ring import PIECE, Ring, place_regions
from djinnd.weights.store import WeightStore

Progress = Callable[[int, int], None]  # bytes on the device, of all that go there


class Residency:
    """Owns the device memory of the blocks. Used by one thread at a time: the loader's until the model is adopted, then
    the engine's."""

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
        self.plan: Plan | None = None
        self.tokens = StepTokens()
        self._name = name
        self._device = device
        self._store = store
        self._dtype = dtype
        self._placing = placing
        self._blocks = [
            PlacedBlock(module, store.buffers[i].layout, store.forms[i], products[i], self._experts_of(i, module))
            for i, module in enumerate(blocks)
        ]
        self._scratch: Tensor | None = None
        self._ring: Ring | None = None
        self._labels: set[str] = set()

    def _experts_of(self, index: int, module: nn.Module) -> Experts | None:
        number = self._store.experts.get(index)
        if number is None:
            return None
        buffer, form = self._store.buffers[number], self._store.forms[number]
        assert buffer.routing is not None
        return Experts(module, buffer.layout, form, buffer.routing, self.tokens, self._device.torch_device)

    # --- a pass -----------------------------------------------------------------------------------------------------

    @property
    def streams(self) -> bool:
        return self._ring is not None

    @property
    def device(self) -> Device:
        return self._device

    def begin(self, index: int) -> None:
        """Work on the block may be queued from now on. Raises what went wrong with its copy."""
        if index >= self.half:
            self._device.catch_up()
        place = self._blocks[index].place
        if self._ring is not None and place is Place.STREAMED:
            self._ring.take()
        if (trace := self._device.trace) is not None:
            assert place is not None
            trace.begin("compute", f"block {index}", place=place.value)

    @property
    def half(self) -> int:
        """The first block that waits for all copies the device expects. Those before it wait for none of them."""
        return len(self._blocks) // 2

    def prepare(self, index: int, rows: int) -> None:
        """Decodes what so many rows will need of the block in plain form."""
        self._blocks[index].prepare(rows, self._scratch)

    def end(self, index: int) -> None:
        """All work on the block has been queued."""
        if (trace := self._device.trace) is not None:
            trace.end("compute")
        if self._ring is not None and self._blocks[index].place is Place.STREAMED:
            self._ring.give_back()

    def pass_over(self, blocks: range) -> None:
        """The pass goes on behind these, without them."""
        if self._ring is not None:
            self._ring.skip(sum(self._blocks[index].place is Place.STREAMED for index in blocks))

    def restart(self) -> None:
        """After a pass that was broken off."""
        if self._ring is not None:
            self._ring.restart()

    @property
    def fetched_bytes(self) -> int:
        """Of experts of streamed blocks, on demand, since they came to be streamed. Waits for the device."""
        streamed = [block.experts for block in self._blocks if block.place is Place.STREAMED]
        return sum(experts.fetched_bytes for experts in streamed if experts is not None)

    def not_finite(self) -> str | None:
        """The first parameter on the host that holds NaN or infinity. Reads all of them."""
        return self._store.not_finite() if self._store.is_attached else None

    # --- places -----------------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Reserved in the device's budget."""
        return 0 if self.plan is None else self.plan.nbytes

    def move(self, plan: Plan, progress: Progress = lambda done, total: None, pinning: Pinning | None = None) -> None:
        """Brings every block to its place in `plan`. No pass is under way, and nobody replays graphs that were captured
        before. `pinning`: of the store's pieces, where that is still under way. Raises OutOfMemory, or what `progress`
        raises; then only `release` may follow."""
        self.make_room(plan)
        if plan.scratch_bytes:
            # Zeroed for families that multiply all experts, most of them by nothing: whatever is there is a number.
            self._scratch = self._allocate(
                "scratch", plan.scratch_bytes // self._dtype.itemsize, self._dtype, zero=True
            )
        moving = [i for i, place in enumerate(plan.places) if self._blocks[i].place is not place]
        self._bring([i for i in moving if plan.places[i] is not Place.STREAMED], plan, progress, pinning)
        if pinning is not None:
            pinning.finish()
        for index, block in enumerate(self._blocks):
            block.place = plan.places[index]
            if block.place is Place.PACKED:
                block.packed = self._parts(index)[0]
        if plan.streamed:
            self._ring = self._make_ring(plan)
        self.plan = plan
        for index, block in enumerate(self._blocks):
            block.bind(self._scratch, self._source_of_experts(index))

    def make_room(self, plan: Plan) -> None:
        """The first part of `move(plan)`, which must follow: gives back what the plan has otherwise."""
        self._device.synchronize()
        self._drop_passage()
        for index, place in enumerate(plan.places):
            if self._blocks[index].place is not place:
                self._drop(index)
        self._device.trim()

    def _bring(self, indices: list[int], plan: Plan, progress: Progress, pinning: Pinning | None) -> None:
        done, total = 0, sum(plan.sizes[i].plain for i in indices)
        staged = [i for i in indices if plan.places[i] is Place.PLAIN and self._blocks[i].form is not None]
        staging = self._staging(staged)
        for index in indices:
            block, size = self._blocks[index], plan.sizes[index]
            if plan.places[index] is Place.PACKED:
                block.memory = self._allocate(f"block {index}", size.least, torch.uint8)
            else:
                block.memory = self._allocate(f"block {index}", size.plain // self._dtype.itemsize, self._dtype)
            with self._device.aside(), torch.inference_mode():
                for number, target in zip(self._store.parts(index), self._parts(index), strict=True):
                    if pinning is not None:
                        pinning.wait(number)
                    source, form = self._store.travelling(number), self._store.forms[number]
                    if index in staged:
                        assert form is not None and staging is not None
                        staging[: len(source)].copy_(source, non_blocking=True)
                        unpack(form, staging[: form.nbytes], target)
                    else:
                        target[: len(source)].copy_(source, non_blocking=True)
            done += plan.sizes[index].plain
            progress(done, total)
        if staging is not None and staging is not self._scratch:
            del staging
            self._release("staging")

    def _staging(self, staged: list[int]) -> Tensor | None:
        """Where the packed form of a block is for a moment that becomes plain: the scratch buffer, if there is one."""
        if not staged:
            return None
        if self._scratch is not None:
            return self._scratch.view(torch.uint8)
        forms = [self._store.forms[number] for i in staged for number in self._store.parts(i)]
        return self._allocate("staging", max(form.nbytes for form in forms if form is not None), torch.uint8)

    def _parts(self, index: int) -> list[Tensor]:
        """Of the memory of a resident block: what each of its buffers has there."""
        memory, numbers = self._blocks[index].memory, self._store.parts(index)
        assert memory is not None
        if memory.dtype == torch.uint8:
            sizes = [form.nbytes for form in (self._store.forms[number] for number in numbers) if form is not None]
        else:
            sizes = [self._store.buffers[number].layout.numel for number in numbers]
        return list(memory.split(sizes))

    def _make_ring(self, plan: Plan) -> Ring:
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

        placing = self._placing
        return Ring(
            self._device,
            memory,
            regions,
            sources,
            prefetch=placing.prefetch,
            piece=placing.piece_bytes or PIECE,
            name=lambda k: f"block {streamed[k]}",
        )

    def _source_of_experts(self, index: int) -> Tensor | None:
        """Where a block's experts are: on the device beside it, or on the host."""
        number = self._store.experts.get(index)
        if number is None:
            return None
        return self._store.host(number) if self._blocks[index].place is Place.STREAMED else self._parts(index)[1]

    # --- memory -----------------------------------------------------------------------------------------------------

    def release(self) -> None:
        """The modules must not run any more."""
        self._drop_passage()
        for index in range(len(self._blocks)):
            self._drop(index)
        for label in list(self._labels):  # of a move that was broken off
            self._release(label)
        self.plan = None

    def _drop_passage(self) -> None:
        """Ring and scratch, and what is bound to them."""
        self._ring = None
        self._scratch = None
        for index, block in enumerate(self._blocks):
            if block.place is Place.STREAMED:
                self._drop(index)
            elif block.place is Place.PACKED:
                block.unbind()
        for label in ("ring", "scratch"):
            self._release(label)

    def _drop(self, index: int) -> None:
        block = self._blocks[index]
        block.place = block.memory = block.packed = None
        block.unbind()
        self._release(f"block {index}")

    def _allocate(self, what: str, numel: int, dtype: torch.dtype, *, zero: bool = False) -> Tensor:
        memory = self._device.allocate(f"{what} of {self._name}", (numel,), dtype, zero=zero)
        self._labels.add(what)
        return memory

    def _release(self, what: str) -> None:
        if what in self._labels:
            self._labels.remove(what)
            self._device.release(f"{what} of {self._name}")

    def check_integrity(self) -> None:
        if self._ring is not None:
            self._ring.check_integrity()
