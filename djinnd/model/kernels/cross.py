"""A few kilobytes between pinned host memory and the device, by a kernel: see model/crossing.py."""

# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024  # of 64 bits, that a program copies


@triton.jit(do_not_specialize=["words"])
def cross_kernel(source, target, words, WORDS: tl.constexpr):
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    # What the host has written since another kernel read there is to be seen: no cache may answer.
    tl.store(target + at, tl.load(source + at, mask=at < words, cache_modifier=".cv"), mask=at < words)


@triton.jit
def cross_counted_kernel(source, target, WORDS: tl.constexpr):
    words = tl.load(source, cache_modifier=".cv")
    at = tl.program_id(0) * WORDS + tl.arange(0, WORDS)
    tl.store(target + at, tl.load(source + at, mask=at < words, cache_modifier=".cv"), mask=at < words)


def cross_counted(source: Tensor, target: Tensor) -> None:
    """As `cross`, of as many words as the source's first one counts when the kernel runs."""
    source, target = (tensor.view(-1).view(torch.int64) for tensor in (source, target))
    assert source.numel() == target.numel()
    cross_counted_kernel[(triton.cdiv(source.numel(), WORDS),)](source, target, WORDS=WORDS, num_warps=4)


def cross(source: Tensor, target: Tensor) -> None:
    """Contiguous, of one size, in whole 64 bits; the one of the two that is the host's is pinned. Queued on the current
    stream: a source on the host stays as it is until that has come by."""
    source, target = (tensor.view(-1).view(torch.int64) for tensor in (source, target))
    assert source.numel() == target.numel() and (source.is_cuda or source.is_pinned())
    cross_kernel[(triton.cdiv(source.numel(), WORDS),)](source, target, source.numel(), WORDS=WORDS, num_warps=4)
