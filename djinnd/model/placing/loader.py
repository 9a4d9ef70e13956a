"""ModelLoader: turns a checkpoint into modules that are bound to device buffers. The steps of a load:

    lay out  builds the family's modules on the meta device and the layout of every buffer; no weight is read
    plan     chooses a place for each block within the memory budget, or raises OutOfMemory with the figures
    fill     reads the files into the arena in host memory, packed if possible; skipped if the arena is filled already
    move     copies each block to its place and binds the modules to it

A load runs in a thread of its own, while sessions of other models go on.
"""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from djinn_client.errors import InvalidRequest, ModelRejected, OutOfMemory
from djinn_client.handover.packed import MAX_UNITS, Unpackable
from djinn_client.protocol import Placing
from djinnd.device import Device, Pinning
from djinnd.device.budget import at_least, gib
from djinnd.model.family.configuration.derived import materialise_buffers
from djinnd.model.family.heads import Head, head_config, make_head
from djinnd.model.family.skeleton import Skeleton, bind, build, make_config
from djinnd.model.family.wrapper import text_config
from djinnd.model.fast.linear import fast_linear_of
from djinnd.model.fast.replacing import replace_modules
from djinnd.model.placing.buffers import buffers_of, recipes_of
from djinnd.model.placing.projections import Product, install_products
from djinnd.model.placing.weight_placement import WeightPlacement
from djinnd.model.tuning import SMALL_PARAMETERS
from djinnd.weights.checkpoint import CheckpointFiles
from djinnd.weights.filling import fill, hashes
from djinnd.weights.forms.coded_form import CodedForm
from djinnd.weights.gguf.checkpoint import GgufCheckpoint
from djinnd.weights.layout import Layout
from djinnd.weights.plan import PAGES_SHARE, PlacementPlan, plan_places
from djinnd.weights.reading import Wait
from djinnd.weights.store import WeightStore

log = logging.getLogger("djinnd.engine")

Progress = Callable[[str, int, int], None]  # stage, done, total; in bytes, or in kernels while compiling
# (bytes, fingerprint) → host memory uint8 [bytes], and the identity of the weights in it, or None if it is not filled.
Arena = Callable[[int, str], tuple[Tensor, str | None]]
Reading = Callable[[], AbstractContextManager[Wait]]  # see `ModelLoader.run`

MAX_BLOCKS = 1024

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(slots=True)
class Weights:
    """A loaded model's weights and the memory under them."""

    name: str
    skeleton: Skeleton
    store: WeightStore
    placement: WeightPlacement
    dtype: torch.dtype
    parameters: int
    notes: list[str]
    identity: str = ""  # hash of the configuration and of all weight bytes; equal wherever the files came from
    fingerprint: str = ""  # hash of identity, dtype and layout: equal for equal bytes in the store
    rest: Tensor | None = None  # device buffer of the parameters outside the blocks
    is_adopted: bool = False  # True if an earlier engine had filled the arena

    @property
    def nbytes(self) -> int:
        """Device memory, in bytes."""
        return self.placement.nbytes + (0 if self.rest is None else self.rest.nbytes + self.skeleton.derived_bytes)

    def release_host(self, device: Device) -> None:
        """Unpins and detaches the host copy. Every block must be resident, and none can be moved afterwards."""
        device.unpin(self.store.pieces())
        self.store.detach()

    def release(self, device: Device) -> None:
        """Frees device memory and pinning. The modules must not run afterwards. The server removes the arena."""
        device.synchronize()
        device.unpin(self.store.pieces())
        self.placement.release()
        if self.rest is not None:
            self.rest = None
            device.release(rest_label(self.name))
            device.budget.release(tables_label(self.name))


class ModelLoader:
    """Loads one model: `ModelLoader(…)`, then `plan` (optional), then `run`. A failed load leaves no device memory
    reserved."""

    def __init__(
        self,
        name: str,
        checkpoint: CheckpointFiles,
        device: Device,
        dtype: str,
        placing: Placing | None = None,
        shared: str | None = None,
    ) -> None:
        """Lays the model out. Reads no weights.

        shared: dtype of weights that a client provides. The checkpoint then has no weights, and `run` gets a filled
            arena.
        The caller owns the checkpoint's files, and keeps them open until `run` has returned.

        Raises ModelRejected for a model that cannot be served, InvalidRequest for an unknown `dtype`.
        """
        self.name = name
        self.device = device
        self.placing = placing or Placing()
        self.checkpoint = checkpoint if shared is None else None
        given = DTYPES[shared] if shared is not None else checkpoint.dtype
        if self.placing.quantise and checkpoint.coded_as:
            told = f"{name} is {checkpoint.coded_as}: only weights of 16 or 32 bits are quantised when they are loaded"
            raise InvalidRequest(told, field="quantise")
        config = make_config(checkpoint.config)
        _check_depth(text_config(config).num_hidden_layers, self.checkpoint)
        self.dtype = compute_dtype(dtype, given, device, self.checkpoint.parameters if self.checkpoint else 0)
        model, head = self._built(config)
        recipes = None if self.checkpoint is None else recipes_of(model, self.checkpoint, head)
        self.skeleton = Skeleton(model)
        if recipes is not None:
            recipes.require(self.skeleton.shapes, self.skeleton.tied)
        if self.placing.kv_dtype and not self.skeleton.kv:
            raise InvalidRequest(f"{name} has no KV, so its KV cannot be in FP8: leave kv_dtype out", field="kv_dtype")
        self._buffers = buffers_of(self.skeleton, recipes, device, self.placing.quantise)
        # On a GPU the host keeps the compute dtype, which is what the bus carries. On a CPU nothing is copied, and the
        # checkpoint's own dtype takes less memory.
        is_coded = any(buffer.coded for buffer in self._buffers)
        self._stored = given if device.torch_device.type == "cpu" and not is_coded else self.dtype
        self.notes: list[str] = []
        if checkpoint.coded_as:
            self.notes.append(checkpoint.coded_as)
        self.store = self._make_store()
        if self.store.codes:
            how = "quantised when they are loaded" if self.placing.quantise else "as they are stored"
            self.notes.append(f"weights {how}: {', '.join(self.store.codes)}")
        if self.placing.kv_dtype:
            self.notes.append(f"keys and values are rounded to {self.placing.kv_dtype}")

    def _built(self, config: PreTrainedConfig) -> tuple[PreTrainedModel, Head | None]:
        """The checkpoint's model, or that of its head."""
        if self.placing.part != "heads":
            return build(config, self.dtype), None
        if self.checkpoint is None or isinstance(self.checkpoint, GgufCheckpoint):
            told = f"{self.name}: djinnd reads heads from safetensors only; leave `part` out"
            raise InvalidRequest(told, field="part")
        model = build(make_config(self.checkpoint.config | head_config(config)), self.dtype)
        return model, make_head(model, config.num_hidden_layers, self.checkpoint)

    def _make_store(self) -> WeightStore:
        why = self._why_plain()
        if not why:
            try:
                return self._store_of(packed=True)
            except Unpackable as error:
                why = str(error)
        if not all(buffer.coded for buffer in self._buffers[:-1]):
            self.notes.append(f"blocks stay plain: {why}")
        return self._store_of(packed=False)

    def _store_of(self, *, packed: bool) -> WeightStore:
        # On a CPU products read plain weights fastest, so blocks with codes are decoded where memory suffices.
        keeps_codes = self.device.torch_device.type != "cpu"
        return WeightStore(self._buffers, self._stored, packed=packed, keeps_codes=keeps_codes)

    def _why_plain(self) -> str:
        """Why the blocks cannot be packed; "" if they can."""
        if not self.placing.packing:
            return "packing is off"
        if self._stored != torch.bfloat16 or self.dtype != torch.bfloat16:
            stored, computed = (str(dtype).removeprefix("torch.") for dtype in (self._stored, self.dtype))
            what = stored if stored == computed else f"{stored}, computed in {computed}"
            return f"only bfloat16 weights can be packed, and these are {what}"
        units = max(len(buffer.packed_units) for buffer in self._buffers[:-1])
        if units > MAX_UNITS:
            return f"they have {units} large matrices, and a packed block has at most {MAX_UNITS}"
        return ""

    @property
    def rest_bytes(self) -> int:
        """Device memory of the parameters outside the blocks, which are always resident: embedding, final norm, head,
        and the tables that are computed from the configuration."""
        return self._buffers[-1].layout.nbytes(self.dtype) + self.skeleton.derived_bytes

    @property
    def fingerprint(self) -> str:
        """Hash of the files' identity, as known before reading them, and of the store's layout, which may differ in
        another version of djinnd. An arena with the same fingerprint holds the same bytes and is not filled again."""
        return self._laid_out("shared" if self.checkpoint is None else self.checkpoint.fingerprint())

    def _laid_out(self, weights: str) -> str:
        extents = zip(self._buffers, self.store.extents, strict=True)
        layout = "".join(f"{buffer.name} {extent} {_places(buffer.layout)};" for buffer, extent in extents)
        layout += ",".join(self.store.codes) + self.placing.quantise
        layout += ";".join(form.places for form in self.store.forms if isinstance(form, CodedForm))
        return hashlib.sha256(f"{weights} {self._stored} {layout}".encode()).hexdigest()

    def _identity(self) -> str:
        """Hash of the configuration and of all weights, which must be in the store."""
        if self.checkpoint is not None:
            identity, quantise = self.checkpoint.identity(), self.placing.quantise
            return hashlib.sha256(f"{identity} {quantise}".encode()).hexdigest() if quantise else identity
        digest = hashlib.sha256(f"shared {self.skeleton.config.to_json_string()}".encode())
        for each in hashes(self.store):
            digest.update(each)
        return digest.hexdigest()

    def plan(
        self, reserved: int, free: int | None = None, budget: int = 0, pages_share: float = PAGES_SHARE
    ) -> PlacementPlan:
        """Chooses a place for every block.

        reserved: bytes that KV and workspace take of `free`.
        free, budget: bytes of device memory; by default the device's.
        pages_share: see plan_places.

        Raises OutOfMemory with the figures, InvalidRequest for a placing that does not fit the model.
        """
        free = self.device.budget.free if free is None else free
        staging = max((form.nbytes for form in self.store.forms if form is not None), default=0)
        try:
            sizes, left = self.store.sizes(self.dtype), free - reserved - self.rest_bytes
            return plan_places(sizes, left, self.placing, staging, pages_share=pages_share)
        except OutOfMemory as error:
            need = error.data["needed"] + reserved + self.rest_bytes
            total = budget or self.device.budget.total
            raise OutOfMemory(
                f"{self.name} needs at least {at_least(need)} of device memory, and {gib(free)} of the budget of "
                f"{gib(total)} is free: it needs {gib(self.rest_bytes)} for embedding and head, {gib(reserved)} for KV "
                f"and workspace, and {error.message}",
                needed=need,
                free=free,
                budget=total,
            ) from error

    def run(
        self,
        arena: Arena,
        progress: Progress,
        reserved: int,
        pages_share: float = PAGES_SHARE,
        reading: Reading = lambda: nullcontext(Future.result),
    ) -> Weights:
        """Loads the model.

        reserved, pages_share: as in `plan`.
        reading: context in which the files are read. The only device work within it is packing.

        Raises ModelRejected or OutOfMemory, and any exception of `arena`, `progress` and `reading`.
        """
        blocks = self.skeleton.adapter.blocks
        products = [install_products(b, buffer.layout) for b, buffer in zip(blocks, self._buffers, strict=False)]
        try:
            return self._run(products, arena, progress, reserved, pages_share, reading)
        except Unpackable as why:
            self.notes.append(f"blocks stay plain: {why}")
            self.store = self._store_of(packed=False)
            return self._run(products, arena, progress, reserved, pages_share, reading)

    def _run(
        self,
        products: list[list[Product]],
        arena: Arena,
        progress: Progress,
        reserved: int,
        pages_share: float,
        reading: Reading,
    ) -> Weights:
        self.plan(reserved, pages_share=pages_share)  # raises OutOfMemory before any large allocation
        store = self.store
        host, identity = arena(store.nbytes, self.fingerprint)
        store.attach(host)
        if self.checkpoint is None:
            _check_image(self.name, store)
        self.device.trim()  # gives cached memory of unloaded models back to the driver
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
            plan = self.plan(reserved, pages_share=pages_share)
            weights.placement.move(plan, lambda done, total: progress("uploading", done, total), pinning)
            self._bring_rest(weights, progress)
            clock.told("blocks_placed", weights.nbytes)
        except BaseException:
            if not _is_pinned(pinning):
                store.detach()  # pinning failed: nothing to unpin
            weights.release(self.device)
            store.detach()
            raise
        for buffer in self._buffers:
            buffer.recipes.clear()  # the checkpoint's files may be closed
            buffer.coded.clear()
        return weights

    def _weights(self, products: list[list[Product]]) -> Weights:
        skeleton, store = self.skeleton, self.store
        blocks = skeleton.adapter.blocks
        placement = WeightPlacement(self.name, self.device, store, self.dtype, blocks, products, self.placing)
        parameters = sum(e.numel for b in self._buffers for e in b.layout.entries.values())
        return Weights(self.name, skeleton, store, placement, self.dtype, parameters, self.notes)

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
        if self.device.torch_device.type == "cpu":
            replace_modules(skeleton.model, fast_linear_of)
        else:
            from djinnd.model.fast import path as fast_path

            def compiling(done: int, total: int) -> None:
                progress("compiling", done, total)

            skeleton.stateful = fast_path.install(
                skeleton.model, blocks, skeleton.stateful, self.dtype, self.device.torch_device, compiling
            )


class _Clock:
    """Logs the duration of each part of a load."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._began = time.monotonic()

    def told(self, event: str, nbytes: int) -> None:
        began, self._began = self._began, time.monotonic()
        log.info("%s model=%s bytes=%d seconds=%.2f", event, self._model, nbytes, self._began - began)


def _is_pinned(pinning: Pinning) -> bool:
    """Waits for pinning to end. Returns True if the pieces are pinned."""
    try:
        pinning.finish()
    except OutOfMemory:
        return False
    return True


def _places(layout: Layout) -> str:
    """The offset of each tensor, and the end of the last one."""
    return " ".join([*(f"{entry.name} {entry.offset}" for entry in layout.entries.values()), str(layout.numel)])


def rest_label(name: str) -> str:
    return f"rest of {name}"


def tables_label(name: str) -> str:
    return f"tables of {name}"


def _check_image(name: str, store: WeightStore) -> None:
    """Raises ModelRejected if the packed blocks in a client's image are not well-formed. The numbers in a well-formed
    block are not checked: they can make the client's own model wrong, and do no other harm."""
    for index, buffer in enumerate(store.buffers):
        try:
            store.travelling(index)
        except ValueError as error:
            where = buffer.name.removesuffix(".")
            raise ModelRejected(f"{name}: the shared weights of {where}: {error}", block=where) from error


def _check_depth(blocks: int, checkpoint: CheckpointFiles | None) -> None:
    """Raises ModelRejected if there are more blocks than the checkpoint can have, since each has a tensor of its own.
    Comes before the modules are built, because building takes time for each block."""
    if checkpoint is not None and blocks > len(checkpoint.tensors):
        raise ModelRejected(
            f"config.json says {blocks:,} blocks, but the checkpoint has only {len(checkpoint.tensors):,} tensors",
            blocks=blocks,
            tensors=len(checkpoint.tensors),
        )
    if blocks > MAX_BLOCKS:
        raise ModelRejected(f"the model has {blocks:,} blocks; djinnd loads at most {MAX_BLOCKS:,}", blocks=blocks)


def compute_dtype(wanted: str, stored: torch.dtype, device: Device, parameters: int = 0) -> torch.dtype:
    """`auto` is the checkpoint's dtype on a GPU. On a CPU it is bfloat16 for large models in bfloat16, as a step's time
    goes into reading weights, and else float32: small models lose no time, and float16 overflows.

    parameters: of the checkpoint; 0: unknown. Raises InvalidRequest for an unknown name.
    """
    if wanted == "auto":
        is_small = parameters <= SMALL_PARAMETERS or stored is not torch.bfloat16
        return torch.float32 if device.torch_device.type == "cpu" and is_small else stored
    if wanted not in DTYPES:
        raise InvalidRequest(f"dtype {wanted!r} is not one of auto, {', '.join(DTYPES)}")
    return DTYPES[wanted]
