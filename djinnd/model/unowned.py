"""Tensors over device memory that something else keeps.

A tensor that a graph was captured with owns its memory in the graphs' pool: held, nothing else of the pool may lie
there. Held for every block and every shape, that is what all hidden states take together, where the blocks of a step
need two of them in turn. The memory itself stays with the graphs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def unowned(tensor: Tensor) -> Tensor:
    """The same memory, shape, strides and dtype (of 2 or 4 bytes). Whoever uses it sees that the memory is there, and
    that what is in it is what it takes it for."""
    return torch.as_tensor(_Described(tensor), device=tensor.device).view(tensor.dtype)


class _Described:
    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = array_interface(tensor)


def array_interface(tensor: Tensor) -> dict[str, Any]:
    """As version 3 of NumPy's and of CUDA's array interface have it, which agree in this much. As integers of its
    dtype's size: neither has a name for bfloat16."""
    return {
        "version": 3,
        "shape": tuple(tensor.shape),
        "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
        "typestr": f"<i{tensor.itemsize}",
        "data": (tensor.data_ptr(), False),
    }
