"""Queries and keys of delta rules, divided by their lengths."""

from __future__ import annotations

import triton
import triton.language as tl

EPS = tl.constexpr(1e-6)  # beside a sum of squares, as in flash-linear-attention and transformers


@triton.jit
def unit_vectors(rows):
    """rows: float32 [rows, width]."""
    return rows / tl.sqrt(tl.sum(rows * rows, 1) + EPS)[:, None]
