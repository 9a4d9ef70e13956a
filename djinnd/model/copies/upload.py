"""Copies small tensors to the device without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


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
