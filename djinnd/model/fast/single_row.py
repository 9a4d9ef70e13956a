"""Products of one row by bfloat16 weights on a CPU with instructions for them.

torch calls oneDNN there, which brings the weights of each product into an order of its own. For one row this takes a
core longer than reading them. torch's own product reads them as they lie. On an AMD EPYC with AVX512-BF16, two threads
read 40 to 50 GB/s of weights instead of 20. Two rows take about as long both ways, and more are faster with oneDNN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from djinnd.model.fast.widened import is_native


def is_single_faster(rows: int, weight: Tensor) -> bool:
    """Returns True if `single_linear` takes less time for so many rows than torch's `linear`. weight: on any device."""
    return rows == 1 and weight.dtype is torch.bfloat16 and weight.device.type == "cpu" and is_native(weight.dtype)


def single_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] of one row, weight [out, in], bias [out], all in bfloat16 on the CPU → [..., out]. Sums are in
    float32.

    oneDNN is off for the whole process meanwhile. A product of another thread is then right, too, but slow. It is
    switched on at the end whatever it was before, because two threads may be here at once.
    """
    torch._C._set_mkldnn_enabled(False)
    try:
        return linear(x, weight, bias)
    finally:
        torch._C._set_mkldnn_enabled(True)
