"""A CUDA device for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from djinnd.device.cuda import CudaDevice

CUDA_MEMORY = 6 << 30  # bytes: room for any reduced model, its graphs and the libraries


@contextmanager
def cuda_device(memory: int = CUDA_MEMORY) -> Iterator[CudaDevice]:
    """The process's memory is limited only while it lives."""
    device = CudaDevice("cuda:0", memory)
    try:
        yield device
    finally:
        device.close()
        torch.cuda.set_per_process_memory_fraction(1.0)
