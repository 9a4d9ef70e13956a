from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from djinnd.model.kernels.launching.scratch import Scratch


def test_scratch_is_allocated_once_and_stays_where_it_is() -> None:
    scratch = Scratch(torch.device("cpu"))
    a, b = scratch.take(100, 20)
    assert (a.numel(), b.numel()) == (100, 20) and a.dtype == torch.float32
    address = a.data_ptr()
    assert scratch.take(50)[0].data_ptr() == address
    large = scratch.take(1000)[0].fill_(2.0)
    assert scratch.take(120)[0].data_ptr() == large.data_ptr()
    a.fill_(1.0)  # a captured graph still writes here
    assert a.data_ptr() == address and (large == 2.0).all()
