"""Sends arrays to the device that a step needs beside its inputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from djinnd.device import Device

_TORCH: dict[np.dtype[np.generic], torch.dtype] = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float32): torch.float32,
}


def send(device: Device, arrays: Sequence[npt.NDArray[np.generic]]) -> list[Tensor]:
    """Sends the arrays in one copy. torch keeps the staging memory until the copy is done."""
    sizes = [-(-array.nbytes // 8) * 8 for array in arrays]
    offsets = np.cumsum(sizes) - sizes
    staging = device.staging(sum(sizes))
    host = staging.numpy()
    for array, offset in zip(arrays, offsets, strict=True):
        host[offset : offset + array.nbytes] = array.view(np.uint8)
    there = torch.empty(len(staging), dtype=torch.uint8, device=device.torch_device)
    there.copy_(staging, non_blocking=True)
    return [
        there[offset : offset + array.nbytes].view(_TORCH[array.dtype])
        for array, offset in zip(arrays, offsets.tolist(), strict=True)
    ]
