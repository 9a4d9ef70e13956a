"""Borrowed tensors: views of device memory that do not keep it allocated.

A tensor made during a capture owns its memory in the graphs' pool: while it is held, the pool cannot reuse that memory.
Holding the hidden states of every block and shape would take the memory of all of them, while the blocks of a step need
only two, in turn. The graphs keep the pool itself alive.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


def borrow(tensor: Tensor) -> Tensor:
    """A tensor with the same memory, shape, strides and dtype (of 2 or 4 bytes) that does not own the memory. The
    caller makes sure that the memory is still there and holds the expected values."""
    described = SimpleNamespace(__cuda_array_interface__=array_interface(tensor))
    return torch.as_tensor(described, device=tensor.device).view(tensor.dtype)


def array_interface(tensor: Tensor) -> dict[str, Any]:
    """Describes the tensor by version 3 of the array interface; NumPy's and CUDA's agree in these keys. The type is an
    integer of the same size, because neither has a name for bfloat16."""
    return {
        "version": 3,
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
        "typestr": f"<i{tensor.itemsize}",
        "data": (tensor.data_ptr(), False),
    }
