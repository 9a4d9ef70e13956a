"""A CUDA device for tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from djinnd.device.cuda import CudaDevice

CUDA_MEMORY = 6 << 30  # bytes: room for any reduced model, its graphs and the libraries


@contextmanager
def cuda_device(memory: int = CUDA_MEMORY) -> Iterator[CudaDevice]:
    """Limits the process's memory only while the device is open."""
    device = CudaDevice("cuda:0", memory)
    try:
        yield device
    finally:
        device.close()
        # cuBLAS keeps 32 MiB of torch's memory for each stream and handle that it has seen, and every device has its
        # own streams. Without this, the twentieth test of a process would find hundreds of MiB taken and unused.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.set_per_process_memory_fraction(1.0)
