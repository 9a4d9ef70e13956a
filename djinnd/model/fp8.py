"""KV in FP8: keys and values as e4m3, one byte each, without a scale.

e4m3 has three bits of mantissa, and numbers from 2**-9 to 448 (arXiv 2209.05433). Larger ones become 448. vLLM's
`fp8_e4m3` with its usual scale of 1 is the same. Attention converts to the dtype of its queries, which is exact, and
always reads the pages: so a token's keys and values are the same numbers for every query that ever sees them.
"""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = 448.0


def to_fp8(x: Tensor) -> Tensor:
    """Rounds to the nearest, ties to even. NaN stays NaN."""
    return x.clamp(-LARGEST, LARGEST).to(FP8)


def as_bytes(x: Tensor) -> Tensor:
    """FP8 as uint8, a view; any other tensor as it is."""
    return x.view(torch.uint8) if x.dtype is FP8 else x
