"""Copies a few kilobytes between pinned host memory and the device by a kernel: see model/copies/pinned_io.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024  # words of 64 bits that a program copies


@triton.jit(do_not_specialize=["words"])
def pinned_copy_kernel(source, target, words, WORDS: tl.constexpr):
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    # .cv bypasses the caches: the host may have written there since another kernel read the same address.
    tl.store(target + at, tl.load(source + at, mask=at < words, cache_modifier=".cv"), mask=at < words)


@triton.jit
def pinned_copy_counted_kernel(source, target, WORDS: tl.constexpr):
    words = tl.load(source, cache_modifier=".cv")
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(target + at, tl.load(source + at, mask=at < words, cache_modifier=".cv"), mask=at < words)


def copy_counted(source: Tensor, target: Tensor) -> None:
    """Like `copy`, but copies only as many words as the first word of the source says when the kernel runs."""
    source, target = (tensor.view(-1).view(torch.int64) for tensor in (source, target))
    assert source.numel() == target.numel()
    pinned_copy_counted_kernel[(triton.cdiv(source.numel(), WORDS),)](source, target, WORDS=WORDS, num_warps=4)


def copy(source: Tensor, target: Tensor) -> None:
    """Queues a copy on the current stream. Both tensors are contiguous and of one size, a multiple of 8 bytes; the one
    on the host is pinned. The caller leaves a source on the host unchanged until the kernel has run."""
    source, target = (tensor.view(-1).view(torch.int64) for tensor in (source, target))
    assert source.numel() == target.numel() and (source.is_cuda or source.is_pinned())
    pinned_copy_kernel[(triton.cdiv(source.numel(), WORDS),)](source, target, source.numel(), WORDS=WORDS, num_warps=4)
