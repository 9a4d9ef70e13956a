"""Fetches the experts that a router has picked: from host memory over the bus, or from packed device memory.

A copy engine cannot do this, because only the device knows which experts are picked, and the host would have to wait
for it. A kernel can, because pinned host memory has an address on the device. Its loads reach 92 % of the bus bandwidth
of copies (docs/log). The grid is fixed, so a captured graph may hold it: a program of an expert that is not picked
returns at once.

`picked` is int32 [experts], not 0 for experts to fetch. The contents of a buffer cannot make a kernel read outside of
that buffer or write outside of the picked experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from djinn_client.handover.packed import FIRST_BASE, STRIPE, PackedForm
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.packed.code import decode, load_patches

PROGRAMS = 512  # most programs an expert
WORDS = 2048  # words, of 32 bits as a rule, that a program copies at once
PAIRS = 1024  # pairs of weights that a program decodes at once
PATCHES = 512  # patches that a program applies at once
PATCHERS = 32  # programs an expert that apply patches
WARPS = 4


@triton.jit
def fetch_plain_kernel(picked, source, target, words, WORDS: tl.constexpr):
    """Copies one expert: `words` words."""
    expert = tl.program_id(1).to(tl.int64)
    if tl.load(picked + expert) == 0:
        return
    source += expert * words
    target += expert * words
    for first in range(tl.program_id(0) * WORDS, words, tl.num_programs(0) * WORDS):
        at = first + tl.max_contiguous(tl.arange(0, WORDS), 4)
        tl.store(target + at, tl.load(source + at, mask=at < words), mask=at < words)


@triton.jit(do_not_specialize=["number"])
def fetch_packed_kernel(picked, sm, nibbles, bases, out, number, pairs, PAIRS: tl.constexpr, PLAINLY: tl.constexpr):
    """Decodes one expert's pairs of weights, without patches. A pair is a byte of nibbles: weights j and j + 64 of a
    group.

    Reads whole lines and separates the halves of a group afterwards, because the bus carries only whole lines.
    """
    expert = tl.program_id(1).to(tl.int64)
    if tl.load(picked + expert) == 0:
        return
    base = tl.load(bases + number)
    sm += expert * pairs * 2
    nibbles += expert * pairs
    out += expert * pairs * 2
    pair, weight = tl.arange(0, PAIRS), tl.arange(0, 2 * PAIRS)
    for first in range(tl.program_id(0) * PAIRS, pairs, tl.num_programs(0) * PAIRS):
        there = first * 2 + weight < pairs * 2
        rest = tl.load(sm + first * 2 + tl.max_contiguous(weight, 16), mask=there, other=0)
        nibble = tl.load(nibbles + first + tl.max_contiguous(pair, 16), mask=first + pair < pairs, other=0)
        low_rest, high_rest = tl.split(tl.permute(tl.reshape(rest, (PAIRS // 64, 2, 64)), (0, 2, 1)))
        nibble = tl.reshape(nibble, (PAIRS // 64, 64))
        low = decode(low_rest, nibble, base, False, PLAINLY)
        high = decode(high_rest, nibble, base, True, PLAINLY)
        weights = tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), (2 * PAIRS,))
        tl.store(out + first * 2 + tl.max_contiguous(weight, 8), weights, mask=there)


@triton.jit
def fetch_patches_kernel(
    picked, patches, head, stripes, out, first_weight, rows, cols, capacity,
    PATCHES: tl.constexpr, STRIPE: tl.constexpr,
):  # fmt: skip
    """Applies the patches of one expert, which is `rows` rows of a unit. The unit begins at `first_weight` and at the
    first of `stripes`; `out` is the whole buffer."""
    expert = tl.program_id(1)
    if tl.load(picked + expert) == 0:
        return
    count = tl.minimum(tl.maximum(tl.load(head + 2), 0), capacity)
    row = expert * rows
    begin = tl.minimum(tl.maximum(tl.load(stripes + row // STRIPE), 0), count)
    end = tl.minimum(tl.load(stripes + tl.cdiv(row + rows, STRIPE)), count)
    lowest = first_weight.to(tl.int64) + row.to(tl.int64) * cols
    highest = lowest + rows.to(tl.int64) * cols
    for first in range(begin + tl.program_id(0) * PATCHES, end, tl.num_programs(0) * PATCHES):
        index, bits = load_patches(patches, first + tl.arange(0, PATCHES), end)
        index = index.to(tl.int64)
        tl.store(out + index, bits.to(tl.int16), mask=(index >= lowest) & (index < highest))


def fetch_plain(picked: Tensor, source: Tensor, out: Tensor) -> None:
    """Copies the picked experts. source, out: [experts, …], of one dtype, contiguous. An expert's bytes are a multiple
    of 64 in large matrices and their scales: then loads are wide enough for the rate of the bus."""
    experts = len(picked)
    assert source.shape == out.shape and source.dtype == out.dtype and len(out) == experts
    assert source.is_contiguous() and out.is_contiguous()
    word = torch.uint8 if source[0].nbytes % 4 else torch.int32
    source, out = (tensor.view(experts, -1).view(word) for tensor in (source, out))
    words = source.shape[1]
    grid = (min(triton.cdiv(words, WORDS), PROGRAMS), experts)
    fetch_plain_kernel[grid](picked, source, out, words, WORDS=WORDS, num_warps=WARPS)


def fetch_packed(picked: Tensor, form: PackedForm, packed: Tensor, out: Tensor) -> None:
    """packed uint8 [form.nbytes] → the picked experts' places in out bf16 [form.numel], exact to the bit. Each unit is
    a stack of experts, and an expert is a whole number of groups."""
    assert packed.numel() == form.nbytes and out.numel() == form.numel and out.dtype == torch.bfloat16
    experts = len(picked)
    head, sm, nibbles = form.head_view(packed), form.sm_view(packed), form.nibbles_view(packed)
    for number, unit in enumerate(form.units):
        pairs = unit.weights // experts // 2
        assert pairs < 1 << 30  # a program counts weights in int32
        fetch_packed_kernel[(min(triton.cdiv(pairs, PAIRS), PROGRAMS), experts)](
            picked, sm[unit.offset :], nibbles[unit.offset // 2 :], head[FIRST_BASE:], out[unit.offset :], number,
            pairs, PAIRS=PAIRS, PLAINLY=INTERPRETED, num_warps=WARPS,
        )  # fmt: skip
    for number, unit in enumerate(form.units):
        fetch_patches_kernel[(PATCHERS, experts)](
            picked, form.patches_view(packed), head, form.stripes_view(packed)[form.first_stripe(number) :],
            out.view(torch.int16), unit.offset, unit.rows // experts, unit.cols, form.capacity,
            PATCHES=PATCHES, STRIPE=STRIPE, num_warps=WARPS,
        )  # fmt: skip
