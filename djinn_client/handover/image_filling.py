"""From a client's tensors into the image of its model: packed on the tensors' own device, or copied as they are."""

from __future__ import annotations

import fcntl
import mmap
import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from djinn_client.errors import OutOfMemory
from djinn_client.handover.named_tensors import NamedTensors
from djinn_client.handover.packed import PackedForm, Unit
from djinn_client.protocol.fields.image import Image, ImageBuffer, ImageTensor
from djinn_client.transport.host_memory import available
from djinn_client.transport.shm import IMAGE_SEALS


def fill(fd: int, image: Image, tensors: NamedTensors, progress: Callable[[int, int], None]) -> None:
    """Writes the image into an empty memfd, and has no mapping of it at the end. One buffer is in work at a time, and
    the memory for the next is being taken meanwhile.

    Raises ModelRejected with the tensor at fault, OutOfMemory, djinn_client.handover.packed.Unpackable.
    """
    names = tensors.names_for(image)
    free = available()
    if free is not None and image.nbytes > free:
        raise OutOfMemory(
            f"the model takes {image.nbytes:,} bytes of host memory, and {free:,} are available",
            needed=image.nbytes,
            free=free,
        )
    with ThreadPoolExecutor(1, "djinn-share") as taking:
        taken = _take(taking, fd, image, 0)
        for index, buffer in enumerate(image.buffers):
            taken.result()
            if index + 1 < len(image.buffers):
                taken = _take(taking, fd, image, index + 1)
            _fill_buffer(fd, image, buffer, tensors, names)
            progress(buffer.offset + buffer.extent, image.nbytes)


def _take(taking: ThreadPoolExecutor, fd: int, image: Image, index: int) -> Future[None]:
    """Reserves a buffer's pages: where the host has none, that is an error here and no SIGBUS later."""
    buffer = image.buffers[index]

    def take() -> None:
        try:
            os.posix_fallocate(fd, buffer.offset, buffer.extent)
        except OSError as error:
            raise OutOfMemory(
                f"the model takes {image.nbytes:,} bytes of host memory; after {buffer.offset:,}: {error.strerror}",
                needed=image.nbytes,
                free=buffer.offset,
            ) from error

    return taking.submit(take)


def _fill_buffer(fd: int, image: Image, buffer: ImageBuffer, tensors: NamedTensors, names: dict[str, str]) -> None:
    dtype: torch.dtype = getattr(torch, image.dtype)
    mapping = mmap.mmap(fd, buffer.extent, offset=buffer.offset)  # ends with the last tensor that looks into it
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    with torch.inference_mode():
        if buffer.units:
            form = PackedForm([Unit(unit.offset, unit.rows, unit.cols) for unit in buffer.units], buffer.numel)
            _pack(form, buffer, tensors, names, memory[: form.nbytes])
            return
        plain = memory[: buffer.numel * dtype.itemsize].view(dtype)
        for wanted in buffer.tensors:
            _place(plain, wanted, tensors.take(names[wanted.names[0]], wanted))


def _pack(form: PackedForm, buffer: ImageBuffer, tensors: NamedTensors, names: dict[str, str], out: Tensor) -> None:
    """On the device of the first tensor."""
    plain: Tensor | None = None
    for wanted in buffer.tensors:
        tensor = tensors.take(names[wanted.names[0]], wanted)
        if plain is None:
            plain = torch.zeros(buffer.numel, dtype=torch.bfloat16, device=tensor.device)
        _place(plain, wanted, tensor)
        del tensor
    assert plain is not None
    if plain.device == out.device:
        form.pack(plain, out)
        return
    packed = torch.empty(form.nbytes, dtype=torch.uint8, device=plain.device)
    used = form.pack(plain, packed)
    out[:used].copy_(packed[:used])


def _place(plain: Tensor, wanted: ImageTensor, tensor: Tensor) -> None:
    plain[wanted.offset : wanted.offset + tensor.numel()].view(tensor.shape).copy_(tensor)


def seal(fd: int) -> None:
    """Seals the memfd for good: no process can change it any more. None may have it mapped for writing."""
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, IMAGE_SEALS | fcntl.F_SEAL_SEAL)
