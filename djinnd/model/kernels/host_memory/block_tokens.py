"""Excludes tokens by masks in pinned host memory. The kernel reads the masks there, so nothing is copied first."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

WORDS = 512  # words of a mask that a program reads: 16 bytes a thread, so that the bus carries whole lines
WARPS = 4
BITS = tl.constexpr(32)


@triton.jit(do_not_specialize=["row_stride"])
def block_tokens_kernel(
    logits, numbers, masks, row_stride,
    VOCAB: tl.constexpr, WIDTH: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """A mask of WIDTH words has a bit for each token, which is 1 if the token may come."""
    place = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * WORDS + tl.arange(0, WORDS)
    # .cv bypasses the caches: the host may have written there since another kernel read the same address.
    row = tl.load(numbers + place, cache_modifier=".cv")
    word = tl.load(masks + place * WIDTH + at, mask=at < WIDTH, other=0, cache_modifier=".cv")
    bit = tl.arange(0, BITS)
    is_blocked = ((word[:, None] >> bit[None, :]) & 1) == 0
    token = at[:, None] * BITS + bit[None, :]
    lowest = tl.full((WORDS, BITS), float("-inf"), tl.float32).to(logits.dtype.element_ty)
    tl.store(logits + row * row_stride + token, lowest, mask=is_blocked & (token < VOCAB))


def block_tokens(logits: Tensor, numbers: Tensor, masks: Tensor) -> None:
    """Sets the logits of ruled-out tokens to -inf, in place. Queued on the current stream.

    logits: [rows, vocab]. numbers: int64 [n], the rows that have masks. masks: int32 [n, width], bits for at least
    `vocab` tokens. numbers and masks are pinned, and the caller leaves them unchanged until the device has read them.
    """
    vocab, width = logits.shape[1], masks.shape[1]
    assert logits.stride(1) == 1 and masks.is_contiguous() and vocab <= width * 32
    block_tokens_kernel[(len(numbers), triton.cdiv(width, WORDS))](
        logits, numbers, masks, logits.stride(0), VOCAB=vocab, WIDTH=width, WORDS=WORDS, num_warps=WARPS
    )
