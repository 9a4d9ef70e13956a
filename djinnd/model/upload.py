"""Small tensors from the host, without waiting for the device."""

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
    """Queued on the current stream, from pinned memory where there is a bus: torch's host allocator keeps that memory
    until the copy is done."""
    pinned = device.type == "cuda"
    if isinstance(values, np.ndarray):  # of which torch makes no pinned tensor by itself
        host = torch.empty(values.shape, dtype=dtype, pin_memory=pinned)
        host.numpy()[...] = values
    else:
        host = torch.tensor(values, dtype=dtype, pin_memory=pinned)
    return host.to(device, non_blocking=pinned)
