"""Products of 16-bit weights on a CPU that has no instructions for them.

torch's product takes as long for each row there: it multiplies 512 rows by bfloat16 weights in six times the time that
float32 takes. Here some of the weights are converted to float32, few enough to stay in the cache, and all rows are
multiplied by them. No memory holds all weights in float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

from djinnd.model.tuning import NARROW_ROWS, WIDENED_NUMBERS


def is_wider_faster(rows: int, weight: Tensor) -> bool:
    """Returns True if `widened_linear` takes less time for so many rows than torch's `linear`. weight: on any
    device."""
    return rows > NARROW_ROWS and weight.device.type == "cpu" and weight.itemsize == 2 and not is_native(weight.dtype)


def widened_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in], weight [out, in], bias [out], all of one 16-bit dtype → [..., out] of that dtype. Sums are in
    float32, and rounded once."""
    rows = x.reshape(-1, x.shape[-1]).float()
    out = torch.empty(len(rows), len(weight), dtype=weight.dtype)
    some = max(WIDENED_NUMBERS // weight.shape[1], 1)
    for first in range(0, len(weight), some):
        part = slice(first, first + some)
        out[:, part] = linear(rows, weight[part].float(), None if bias is None else bias[part].float())
    return out.view(*x.shape[:-1], -1)


@cache
def is_native(dtype: torch.dtype) -> bool:
    """Returns True if torch multiplies by oneDNN, which it does on processors that are fast with this dtype."""
    if not torch.backends.mkldnn.is_available():
        return False
    ask = torch.ops.mkldnn
    return bool(ask._is_mkldnn_bf16_supported() if dtype is torch.bfloat16 else ask._is_mkldnn_fp16_supported())
