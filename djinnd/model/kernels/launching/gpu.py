"""A GPU as far as launches depend on it: its multiprocessors, their shared memory, and whether they convert FP8."""

from __future__ import annotations

import torch

from djinnd.model.kernels.launching.interpreter import INTERPRETED


def processors(device: torch.device) -> int:
    """The number of the device's multiprocessors; 1 on a CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).multi_processor_count
    return 1


def shared_memory(device: torch.device) -> int:
    """Most bytes of shared memory that a program may have."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).shared_memory_per_block_optin)  # type: ignore[attr-defined]
    return 1 << 16


def has_fp8(device: torch.device) -> bool:
    """Returns True if the device's processors convert FP8."""
    return device.type == "cuda" and not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)
