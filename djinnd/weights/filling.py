"""From a checkpoint's files into a WeightStore, block after block, in parallel, with progress.

files ──threads──► host view, plain                                   where the store is plain
files ──threads──► staging (two, pinned) ──► device: pack ──► host    where it is packed: a pass over the bus each way
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count

import torch
from torch import Tensor
from xxhash import xxh3_128

from djinn_client.errors import OutOfMemory
from djinn_client.packed import PackedForm
from djinnd.device import Device
from djinnd.weights.checkpoint import PIECE
from djinnd.weights.reading import Readers, Wait
from djinnd.weights.store import WeightStore

Progress = Callable[[int, int], None]  # bytes done, bytes in all

READERS = min(16, os.cpu_count() or 1)
AHEAD = 2  # buffers that are being read while one is packed

_numbers = count()


def fill(store: WeightStore, device: Device, progress: Progress, wait: Wait = Future.result) -> None:
    """`wait` gives the results of what threads read, or gives up. Raises ModelRejected with the tensor at fault,
    djinn_client.packed.Unpackable, or what `progress` and `wait` raise; then no other buffer is begun, and nobody
    writes to the store any more but who never comes back from a read."""
    done = 0
    under_way: deque[tuple[int, Tensor, list[Future[None]]]] = deque()
    packer = Packer(store, device) if store.is_packed else None
    readers = Readers(READERS)

    def finish() -> None:
        nonlocal done
        index, plain, jobs = under_way.popleft()
        for job in jobs:
            wait(job)
        done += _finish(store, packer, index, plain)
        progress(done, store.nbytes)

    try:
        for index, buffer in enumerate(store.buffers):
            if len(under_way) == AHEAD:
                finish()
            packed = store.forms[index] is not None
            plain = packer.staging(index) if packer is not None and packed else store.host(index)
            views = buffer.layout.views(plain)
            jobs = [readers.submit(partial(buffer.recipes[name], view)) for name, view in views.items()]
            under_way.append((index, plain, jobs))
        while under_way:
            finish()
    finally:
        readers.close()
        if packer is not None:
            packer.close()


def _finish(store: WeightStore, packer: Packer | None, index: int, plain: Tensor) -> int:
    """Bytes of the store that are filled now."""
    form = store.forms[index]
    if form is not None:
        assert packer is not None
        packer.pack(form, plain, store.host(index))
    return store.extents[index]


def hashes(store: WeightStore) -> list[bytes]:
    """Of the buffers, each of all its bytes as they lie in the store."""
    with ThreadPoolExecutor(READERS, "djinn-hash") as threads:
        return list(threads.map(lambda index: _hash(store.host(index)), range(len(store.buffers))))


def _hash(buffer: Tensor) -> bytes:
    digest = xxh3_128()
    for piece in buffer.view(torch.uint8).split(PIECE):  # other threads run within each
        digest.update(piece.numpy().data)
    return digest.digest()


class Packer:
    """Packs blocks on the device, or on the host where the device has no room for it. Owns staging and device memory
    until `close`."""

    def __init__(self, store: WeightStore, device: Device) -> None:
        forms = [form for form in store.forms if form is not None]
        numel = max(form.numel for form in forms)
        self._device = device
        # Zeroed: what pads the vectors travels with them.
        self._staging = [device.staging(numel * 2).zero_().view(torch.bfloat16) for _ in range(AHEAD)]
        self._layouts = [buffer.layout for buffer in store.buffers]
        self._label = f"packing {next(_numbers)}"
        self._memory: Tensor | None = None
        if device.torch_device.type != "cpu":
            try:
                room = numel * 2 + max(form.nbytes for form in forms)
                self._memory = device.allocate(self._label, (room,), torch.uint8)
            except OutOfMemory:
                pass

    def staging(self, index: int) -> Tensor:
        """Where to put the plain block `index`: [numel], bfloat16. Free again when it has been packed."""
        return self._staging[index % AHEAD][: self._layouts[index].numel]

    def pack(self, form: PackedForm, plain: Tensor, out: Tensor) -> None:
        if self._memory is None:
            form.pack(plain, out)
            return
        with self._device.aside():
            there = self._memory[: form.numel * 2].view(torch.bfloat16)
            packed = self._memory[form.numel * 2 :][: form.nbytes]
            there.copy_(plain, non_blocking=True)
            used = form.pack(there, packed)
            out[:used].copy_(packed[:used], non_blocking=True)

    def close(self) -> None:
        self._staging.clear()
        if self._memory is not None:
            self._memory = None
            self._device.release(self._label)
