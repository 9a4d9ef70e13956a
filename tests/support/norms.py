"""The kinds of RMSNorm that the kernel computes, compared with torch. Tensors are made on torch's default device."""

from __future__ import annotations

from itertools import product

import torch

from djinnd.model.fast.norm import computed
from djinnd.model.kernels.fused.rms_norm import (
    BEFORE,
    NO_GATE,
    ROUNDED,
    SHIFTED,
    SIGMOID,
    SILU,
    WIDE,
    NormKind,
    rms_norm,
)

SCALES = (ROUNDED, WIDE, SHIFTED)
NORM_KINDS = [
    *(NormKind(scale.value, gate.value) for scale, gate in product(SCALES, (NO_GATE, BEFORE, SILU, SIGMOID))),
    *(NormKind(scale.value, gate.value, 3) for scale, gate in product((ROUNDED, WIDE), (BEFORE, SILU))),
]


@torch.inference_mode()
def check_norm(kind: NormKind, width: int, dtype: torch.dtype) -> None:
    """Compares the kernel with torch. x and the gate are two halves of one tensor, so their rows are not contiguous."""
    both, weight = torch.randn(2, 5, 2 * width).to(dtype), torch.randn(width).to(dtype)
    x, gate = both.chunk(2, -1)
    gates = (gate,) if kind.gate else ()
    wanted, got = computed(x, weight, 1e-5, kind, *gates), rms_norm(x, weight, 1e-5, kind, *gates)
    assert got.dtype == wanted.dtype
    if dtype == torch.float32:  # the order of the sum, and the exponential, affect the last bits
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
    else:  # rarely, one unit in the last place; with a rounded product, of either
        torch.testing.assert_close(got, wanted, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
        assert (got == wanted).float().mean() > 0.99
