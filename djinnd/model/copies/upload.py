"""Copies small tensors to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinnd.device import Device


def upload(
    values: Sequence[float] | Sequence[Sequence[float]] | npt.NDArray[Any], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Queues the copy on the current stream. On CUDA the source is pinned memory, which torch's host allocator keeps
    until the copy is done."""
    pinned = device.type == "cuda"
    if isinstance(values, np.ndarray):  # torch.tensor cannot make a pinned tensor of an array
        host = torch.empty(values.shape, dtype=dtype, pin_memory=pinned)
        host.numpy()[...] = values
    else:
        host = torch.tensor(values, dtype=dtype, pin_memory=pinned)
    return host.to(device, non_blocking=pinned)


def upload_arrays(device: Device, arrays: Sequence[npt.NDArray[np.generic]]) -> list[Tensor]:
    """Queues one copy of all arrays, of int64, int32 or float32. torch keeps the staging memory until the copy is
    done."""
    sizes = [-(-array.nbytes // 8) * 8 for array in arrays]
    offsets = np.cumsum(sizes) - sizes
    staging = device.staging(sum(sizes))
    host = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        host[offset : offset + array.nbytes] = array.view(np.uint8)
    there = torch.empty(len(staging), dtype=torch.uint8, device=device.torch_device)
    there.copy_(staging, non_blocking=True)
    return [
        there[offset : offset + array.nbytes].view(getattr(torch, array.dtype.name))
        for array, offset in zip(arrays, offsets.tolist(), strict=True)
    ]
