"""From a checkpoint to modules over device buffers.

    lay out  the family's modules on meta, layouts; the checkpoint has read the headers   nothing large is touched
    plan     a place for each block within the budget                             or OutOfMemory with the figures
    fill     files → arena, packed where that can be (skipped where it has been filled before)
    move     every block to its place; modules are bound to them

Runs in a thread of its own: sessions of other models go on meanwhile.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from djinn_client.errors import InvalidRequest, ModelRejected, OutOfMemory
from djinn_client.packed import MAX_UNITS, Unpackable
from djinn_client.protocol import Placing
from djinnd.device import Device, Pinning
from djinnd.device.budget import at_least, gib
from djinnd.model.derived import materialise_buffers
from djinnd.model.projections import Product, install_products
from djinnd.model.recipes import RecipeBook
from djinnd.model.residency import Residency
from djinnd.model.skeleton import Skeleton, bind, build, make_config
from djinnd.weights.checkpoint import Checkpoint
from djinnd.weights.filling import fill, hashes
from djinnd.weights.layout import Layout
from djinnd.weights.plan import PAGES_SHARE, Plan, plan_places
from djinnd.weights.reading import Wait
from djinnd.weights.store import Buffer, Routing, WeightStore

log = logging.getLogger("djinnd.engine")

Progress = Callable[[str, int, int], None]  # stage, bytes (or kernels) done, bytes (or kernels) in all
# bytes, fingerprint → uint8 [bytes], and the identity of what fills them already; None: they are to be filled
Arena = Callable[[int, str], tuple[Tensor, str | None]]
Reading = Callable[[], AbstractContextManager[Wait]]  # see `Loader.run`

MAX_BLOCKS = 1024

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class Weights:
    """A loaded model's weights and the memory under them."""

    name: str
    skeleton: Skeleton
    store: WeightStore
    residency: Residency
    dtype: torch.dtype
    parameters: int
    notes: list[str]
    identity: str = ""  # of the model: its configuration and all bytes of its weights, wherever they came from
    fingerprint: str = ""  # of the store's bytes: identity, dtype and layout
    rest: Tensor | None = None  # the buffer of what belongs to no block
    is_adopted: bool = False  # an earlier engine had read them

    @property
    def nbytes(self) -> int:
        """On the device."""
        return self.residency.nbytes + (0 if self.rest is None else self.rest.nbytes + self.skeleton.derived_bytes)

    def release_host(self, device: Device) -> None:
        """Every block is resident, and is not to move again."""
        device.unpin(self.store.pieces())
        self.store.detach()

    def release(self, device: Device) -> None:
        """The model's modules must not run any more. The arena is the server's to remove."""
        device.synchronize()
        device.unpin(self.store.pieces())
        self.residency.release()
        if self.rest is not None:
            self.rest = None
            device.release(rest_label(self.name))
            device.budget.release(tables_label(self.name))


class Loader:
    """Loads one model: `Loader(…)`, `plan`, `run`. What fails leaves nothing behind on the device."""

    def __init__(
        self,
        name: str,
        checkpoint: Checkpoint,
        device: Device,
        dtype: str,
        placing: Placing | None = None,
        shared: str | None = None,
    ) -> None:
        """`shared`: the checkpoint has no weights; a client has them in this dtype, and the arena comes filled by it.
        The checkpoint's files stay the caller's, and open until `run` has returned; before `run` none is read.

        Raises ModelRejected, or InvalidRequest for a `dtype` that is none."""
        self.name = name
        self.device = device
        self.placing = placing or Placing()
        self.checkpoint = checkpoint if shared is None else None
        given = DTYPES[shared] if shared is not None else checkpoint.dtype
        config = make_config(checkpoint.config)
        _check_depth(config.num_hidden_layers, self.checkpoint)
        self.dtype = compute_dtype(dtype, given, device)
        model = build(config, self.dtype)
        recipes = None if self.checkpoint is None else RecipeBook(model, self.checkpoint)
        self.skeleton = Skeleton(model)
        if recipes is not None:
            recipes.require(self.skeleton.names, self.skeleton.tied)
        self._buffers = [
            Buffer(pre, lay, {} if recipes is None else {n: recipes.recipe(pre + n) for n in lay.entries}, routing)
            for pre, lay, routing in _layouts(self.skeleton)
        ]
        # A bus carries the dtype that is computed in; where there is none, the weights' own takes less memory.
        self._stored = given if device.torch_device.type == "cpu" else self.dtype
        self.notes: list[str] = []
        self.store = self._make_store()

    def _make_store(self) -> WeightStore:
        why = self._why_plain()
        if not why:
            try:
                return WeightStore(self._buffers, self._stored, packed=True)
            except Unpackable as error:
                why = str(error)
        self.notes.append(f"blocks stay plain: {why}")
        return WeightStore(self._buffers, self._stored, packed=False)

    def _why_plain(self) -> str:
        if not self.placing.packing:
            return "packing is off"
        if self._stored != torch.bfloat16 or self.dtype != torch.bfloat16:
            stored, computed = (str(dtype).removeprefix("torch.") for dtype in (self._stored, self.dtype))
            what = stored if stored == computed else f"{stored}, computed in {computed}"
            return f"the code is for bfloat16 weights, these are {what}"
        units = max(len(buffer.layout.units) for buffer in self._buffers[:-1])
        if units > MAX_UNITS:
            return f"they have {units} matrices, the code has room for {MAX_UNITS}"
        return ""

    @property
    def rest_bytes(self) -> int:
        """Of what belongs to no block and is always resident: embedding, final norm, head, and tables that are derived
        from the configuration."""
        return self._buffers[-1].layout.nbytes(self.dtype) + self.skeleton.derived_bytes

    @property
    def fingerprint(self) -> str:
        """Of the files as they are before they are read, and of where their tensors are in the store: an arena with the
        same one need not be filled again."""
        return self._laid_out("shared" if self.checkpoint is None else self.checkpoint.fingerprint())

    def _laid_out(self, weights: str) -> str:
        extents = zip(self._buffers, self.store.extents, strict=True)
        layout = "".join(f"{buffer.name} {buffer.layout.numel} {extent};" for buffer, extent in extents)
        return hashlib.sha256(f"{weights} {self._stored} {layout}".encode()).hexdigest()

    def _identity(self) -> str:
        """When the weights are in the store."""
        if self.checkpoint is not None:
            return self.checkpoint.identity()
        digest = hashlib.sha256(f"shared {self.skeleton.config.to_json_string()}".encode())
        for each in hashes(self.store):
            digest.update(each)
        return digest.hexdigest()

    def plan(self, beside: int, free: int | None = None, budget: int = 0, pages_share: float = PAGES_SHARE) -> Plan:
        """A place for every block in `free` bytes of a `budget`, by default the device's, of which KV and workspace
        take `beside`. `pages_share`: see plan_places. Raises OutOfMemory with the figures, InvalidRequest for a placing
        that the model cannot have."""
        free = self.device.budget.free if free is None else free
        staging = max((form.nbytes for form in self.store.forms if form is not None), default=0)
        try:
            sizes, left = self.store.sizes(self.dtype), free - beside - self.rest_bytes
            return plan_places(sizes, left, self.placing, staging, pages_share=pages_share)
        except OutOfMemory as error:
            need = error.data["needed"] + beside + self.rest_bytes
            total = budget or self.device.budget.total
            raise OutOfMemory(
                f"{self.name} needs {at_least(need)} of device memory at the least, {gib(free)} of the budget of "
                f"{gib(total)} is free: {gib(self.rest_bytes)} for embedding and head, {gib(beside)} for KV and "
                f"workspace, and {error.message}",
                needed=need,
                free=free,
                budget=total,
            ) from error

    def run(
        self,
        arena: Arena,
        progress: Progress,
        beside: int,
        pages_share: float = PAGES_SHARE,
        reading: Reading = lambda: nullcontext(Future.result),
    ) -> Weights:
        """`beside` and `pages_share` as in `plan`. Files are read within `reading`, and the device is not used there
        but for packing. Raises ModelRejected or OutOfMemory, and what `arena`, `progress` and `reading` raise."""
        blocks = self.skeleton.adapter.blocks
        products = [install_products(b, buffer.layout) for b, buffer in zip(blocks, self._buffers, strict=False)]
        try:
            return self._run(products, arena, progress, beside, pages_share, reading)
        except Unpackable as why:
            self.notes.append(f"blocks stay plain: {why}")
            self.store = WeightStore(self._buffers, self._stored, packed=False)
            return self._run(products, arena, progress, beside, pages_share, reading)

    def _run(
        self,
        products: list[list[Product]],
        arena: Arena,
        progress: Progress,
        beside: int,
        pages_share: float,
        reading: Reading,
    ) -> Weights:
        self.plan(beside, pages_share=pages_share)  # before anything large is touched
        store = self.store
        host, identity = arena(store.nbytes, self.fingerprint)
        store.attach(host)
        if self.checkpoint is None:
            _check_image(self.name, store)
        self.device.trim()  # of what models had that have gone
        clock = _Clock(self.name)
        pinning = self.device.begin_to_pin(store.pieces(), read_only=self.checkpoint is None)
        weights = self._weights(products)
        weights.is_adopted = bool(identity)
        try:
            if not identity and self.checkpoint is not None:
                pinning.finish()
                clock.told("host_pinned", store.nbytes)
                with reading() as wait:
                    fill(store, self.device, lambda done, total: progress("reading", done, total), wait)
                clock.told("checkpoint_read", store.nbytes)
            weights.identity = identity or self._identity()
            weights.fingerprint = self._laid_out(weights.identity)
            plan = self.plan(beside, pages_share=pages_share)
            weights.residency.move(plan, lambda done, total: progress("uploading", done, total), pinning)
            self._bring_rest(weights, progress)
            clock.told("blocks_placed", weights.nbytes)
        except BaseException:
            if not _is_pinned(pinning):
                store.detach()  # there is nothing to unpin
            weights.release(self.device)
            store.detach()
            raise
        for buffer in self._buffers:
            buffer.recipes.clear()  # the checkpoint's files may be closed
        return weights

    def _weights(self, products: list[list[Product]]) -> Weights:
        skeleton, store = self.skeleton, self.store
        blocks = skeleton.adapter.blocks
        residency = Residency(self.name, self.device, store, self.dtype, blocks, products, self.placing)
        parameters = sum(e.numel for b in self._buffers for e in b.layout.entries.values())
        return Weights(self.name, skeleton, store, residency, self.dtype, parameters, self.notes)

    def _bring_rest(self, weights: Weights, progress: Progress) -> None:
        skeleton, layout = self.skeleton, self._buffers[-1].layout
        self.device.budget.reserve(tables_label(self.name), skeleton.derived_bytes)
        try:
            weights.rest = self.device.allocate(rest_label(self.name), (layout.numel,), self.dtype)
        except BaseException:
            self.device.budget.release(tables_label(self.name))
            raise
        self.device.copy(weights.rest, self.store.host(len(self._buffers) - 1)).wait()
        blocks = skeleton.adapter.blocks
        materialise_buffers(skeleton.model, blocks, self.device.torch_device)
        views = layout.views(weights.rest)
        for first, others in skeleton.tied.items():
            views |= dict.fromkeys(others, views[first])
        bind(skeleton.model, views)
        if self.device.torch_device.type == "cuda":
            from djinnd.model import fast_path  # needs Triton, which comes with CUDA builds of torch

            def compiling(done: int, total: int) -> None:
                progress("compiling", done, total)

            fast_path.install(skeleton.model, blocks, self.dtype, self.device.torch_device, compiling)


def _layouts(skeleton: Skeleton) -> Iterator[tuple[str, Layout, Routing | None]]:
    """Of the store's buffers, in its order: their names' prefix, the layout, and of experts how they are picked."""
    for index, prefix in enumerate(skeleton.prefixes):
        yield prefix, skeleton.block_layout(index), None
    for index, stack in enumerate(skeleton.stacks):
        if stack is not None:
            yield skeleton.prefixes[index], skeleton.experts_layout(index), stack.routing
    yield "", skeleton.rest_layout(), None


class _Clock:
    """Logs how long each part of a load took."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._began = time.monotonic()

    def told(self, event: str, nbytes: int) -> None:
        began, self._began = self._began, time.monotonic()
        log.info("%s model=%s bytes=%d seconds=%.2f", event, self._model, nbytes, self._began - began)


def _is_pinned(pinning: Pinning) -> bool:
    """When that is decided."""
    try:
        pinning.finish()
    except OutOfMemory:
        return False
    return True


def rest_label(name: str) -> str:
    return f"rest of {name}"


def tables_label(name: str) -> str:
    return f"tables of {name}"


def _check_image(name: str, store: WeightStore) -> None:
    """Raises ModelRejected where a client's image has something else in the place of a packed block. What is inside of
    one can make the model wrong, and nothing else."""
    for index, buffer in enumerate(store.buffers):
        try:
            store.travelling(index)
        except ValueError as error:
            where = buffer.name.removesuffix(".")
            raise ModelRejected(f"{name}: the shared weights of {where}: {error}", block=where) from error


def _check_depth(blocks: int, checkpoint: Checkpoint | None) -> None:
    """Before any module is built, which takes time for each block: every block has tensors of its own."""
    if checkpoint is not None and blocks > len(checkpoint.tensors):
        raise ModelRejected(
            f"config.json promises {blocks:,} blocks, the checkpoint has {len(checkpoint.tensors):,} tensors in all",
            blocks=blocks,
            tensors=len(checkpoint.tensors),
        )
    if blocks > MAX_BLOCKS:
        raise ModelRejected(f"a model of {blocks:,} blocks is not taken; at most {MAX_BLOCKS:,}", blocks=blocks)


def compute_dtype(wanted: str, stored: torch.dtype, device: Device) -> torch.dtype:
    """`auto`: as in the checkpoint; on a CPU float32, where 16-bit products are slow or inexact."""
    if wanted == "auto":
        return torch.float32 if device.torch_device.type == "cpu" else stored
    if wanted not in DTYPES:
        raise InvalidRequest(f"dtype {wanted!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]
