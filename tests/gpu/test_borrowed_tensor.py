from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.model.copies.borrowed_tensor import borrow
from tests.support.paged import same_bytes

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_borrowed_tensor_is_the_same_memory_and_keeps_none_of_it(dtype: torch.dtype) -> None:
    tensor = torch.randn(8, 1024, 512, device="cuda").to(dtype).transpose(0, 1)
    other = borrow(tensor)
    assert (other.data_ptr(), other.shape, other.stride()) == (tensor.data_ptr(), tensor.shape, tensor.stride())
    assert other.dtype == dtype and same_bytes(other, tensor)
    other[3, 2] = 7
    assert bool((tensor[3, 2] == 7).all())
    held, nbytes = torch.cuda.memory_allocated(), tensor.nbytes
    del tensor
    assert held - torch.cuda.memory_allocated() >= nbytes
