"""The array interface of borrowed tensors, as NumPy reads it. tests/gpu/test_borrowed_tensor.py tests the tensors."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor

from djinnd.model.copies.borrowed_tensor import array_interface
from tests.support.paged import same_bytes


def described(tensor: Tensor) -> Tensor:
    array = np.asarray(SimpleNamespace(__array_interface__=array_interface(tensor)))
    return torch.from_numpy(array).view(tensor.dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_description_has_the_same_memory_and_shape(dtype: torch.dtype) -> None:
    for part in (slice(None), slice(1, 3), (slice(None), slice(None, None, 2), 5)):
        tensor = torch.randn(4, 6, 10).to(dtype)[part].transpose(0, 1)
        other = described(tensor)
        assert (other.shape, other.stride(), other.dtype) == (tensor.shape, tensor.stride(), dtype)
        assert same_bytes(other, tensor)
        other.fill_(3)
        assert bool((tensor == 3).all())
