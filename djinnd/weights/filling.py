"""Fills a WeightStore from a checkpoint's files, block after block, with parallel reads.

plain or coded buffer   files ──threads──► host memory
packed buffer           files ──threads──► staging (two, pinned) ──► device: pack ──► host memory
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
from djinn_client.handover.packed import PackedForm
from djinnd.device import Device
from djinnd.weights.checkpoint import PIECE
from djinnd.weights.forms.coded_form import CodedForm
from djinnd.weights.reading import Readers, Wait
from djinnd.weights.store import WeightStore

Progress = Callable[[int, int], None]  # bytes done, bytes in all

READERS = min(16, os.cpu_count() or 1)
AHEAD = 2  # buffers that are read at the same time; also the number of staging buffers

_numbers = count()


def fill(store: WeightStore, device: Device, progress: Progress, wait: Wait = Future.result) -> None:
    """Fills all buffers of the store.

    wait: returns the result of a read, or raises to give up; see reading.Patience.

    Raises ModelRejected with the tensor at fault, djinn_client.handover.packed.Unpackable, or an exception of
    `progress` or `wait`. After that no other buffer is begun, and only a thread that hangs in a read might still write
    to the store.
    """
    done = 0
    under_way: deque[tuple[int, Tensor, list[Future[None]]]] = deque()
    packer = Packer(store, device) if store.is_packed else None
    readers = Readers(READERS)

    def finish() -> None:
        nonlocal done
        index, plain, jobs = under_way.popleft()
        for job in jobs:
            wait(job)
        form = store.forms[index]
        if isinstance(form, PackedForm):
            assert packer is not None
            packer.pack(form, plain, store.host(index))
        done += store.extents[index]
        progress(done, store.nbytes)

    try:
        for index, buffer in enumerate(store.buffers):
            if len(under_way) == AHEAD:
                finish()
            form, target = store.forms[index], store.host(index)
            if isinstance(form, CodedForm):
                form.clear(target)
                calls = form.filling(target, buffer.coded, buffer.recipes)
            else:
                target = target if form is None or packer is None else packer.staging(index)
                calls = [partial(buffer.recipes[name], view) for name, view in buffer.layout.views(target).items()]
            under_way.append((index, target, [readers.submit(call) for call in calls]))
        while under_way:
            finish()
    finally:
        readers.close()
        if packer is not None:
            packer.close()


def hashes(store: WeightStore) -> list[bytes]:
    """A hash of each buffer's bytes in the store."""
    with ThreadPoolExecutor(READERS, "djinn-hash") as threads:
        return list(threads.map(lambda index: _hash(store.host(index)), range(len(store.buffers))))


def _hash(buffer: Tensor) -> bytes:
    digest = xxh3_128()
    for piece in buffer.view(torch.uint8).split(PIECE):  # `update` releases the GIL
        digest.update(piece.numpy().data)
    return digest.digest()


class Packer:
    """Packs blocks on the device, or on the host if the device has too little free memory. Owns staging and device
    memory until `close`."""

    def __init__(self, store: WeightStore, device: Device) -> None:
        forms = [form for form in store.forms if isinstance(form, PackedForm)]
        numel = max(form.numel for form in forms)
        self._device = device
        # Zeroed because the padding between vectors is stored with them.
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
        """Memory for buffer `index` in plain form: [numel], bfloat16. It may be reused after `pack`."""
        return self._staging[index % AHEAD][: self._layouts[index].numel]

    def pack(self, form: PackedForm, plain: Tensor, out: Tensor) -> None:
        """Packs `plain` to `out`, uint8 in host memory. Raises Unpackable."""
        if self._memory is None:
            form.pack(plain, out)
            return
        with self._device.side_stream():
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
