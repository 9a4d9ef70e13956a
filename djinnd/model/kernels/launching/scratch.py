"""Scratch: device memory that one kernel of a call of attention writes and the next one reads."""

from __future__ import annotations

import torch
from torch import Tensor

from djinnd.model.kernels.launching.gpu import processors


class Scratch:
    """A float32 buffer for all calls on the compute stream. They can share it because they run one after another.

    Captured graphs keep addresses, so a buffer that became too small is kept beside its larger successor. Nothing may
    be allocated during a capture, so the caller runs the same call once before it.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.processors = processors(device)
        self._buffers: list[Tensor] = []

    def take(self, *sizes: int) -> tuple[Tensor, ...]:
        """→ one float32 tensor for each size, of at least that many elements, aligned to 16 bytes. The tensors are
        valid until the next call."""
        sizes = tuple(-(-size // 4) * 4 for size in sizes)
        total = sum(sizes)
        if not self._buffers or self._buffers[-1].numel() < total:
            assert not (self.device.type == "cuda" and torch.cuda.is_current_stream_capturing())
            self._buffers.append(torch.empty(total, dtype=torch.float32, device=self.device))
        return self._buffers[-1][:total].split(sizes)
