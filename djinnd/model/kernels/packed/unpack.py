"""Unpacks a packed block to plain weights, at memory bandwidth. Batches of many tokens, such as prefills, need that."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import triton
import triton.language as tl
from torch import Tensor

from djinn_client.handover.packed import FIRST_BASE, PackedForm
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.packed.code import decode, load_patches

PAIRS = 1024  # pairs of weights that one program decodes
PATCHES = 1024  # patches that one program applies
WARPS = 4


@triton.jit(do_not_specialize=["number"])
def unpack_kernel(sm, nibbles, bases, out, number, pairs, PAIRS: tl.constexpr, PLAINLY: tl.constexpr):
    """Decodes PAIRS pairs of weights of one unit. A pair is a byte of nibbles: weights j and j + 64 of a group."""
    first = tl.program_id(0).to(tl.int64) * PAIRS
    pair = tl.arange(0, PAIRS)
    there = pair < tl.minimum(pairs - first, PAIRS).to(tl.int32)
    low = pair // 64 * 128 + pair % 64
    # Eight weights a thread: a store writes at most 16 bytes, and the loads need not be wider.
    loaded, low_loaded = tl.max_contiguous(pair, 8), tl.max_contiguous(low, 8)
    nibble = tl.load(nibbles + first + loaded, mask=there, other=0)
    low_rest = tl.load(sm + first * 2 + low_loaded, mask=there, other=0)
    high_rest = tl.load(sm + first * 2 + 64 + low_loaded, mask=there, other=0)
    base = tl.load(bases + number)
    tl.store(out + first * 2 + low, decode(low_rest, nibble, base, False, PLAINLY), mask=there)
    tl.store(out + first * 2 + low + 64, decode(high_rest, nibble, base, True, PLAINLY), mask=there)


@triton.jit
def patch_kernel(patches, head, out, capacity, matrices, PATCHES: tl.constexpr):
    """Applies up to PATCHES patches. Their places are bounded, because the buffer's contents are not trusted."""
    first = tl.program_id(0) * PATCHES
    count = tl.minimum(tl.load(head + 2), capacity)
    if first >= count:
        return
    index, bits = load_patches(patches, first + tl.arange(0, PATCHES), count)
    index = index.to(tl.int64)
    tl.store(out + index, bits.to(tl.int16), mask=index < matrices)


def unpack(form: PackedForm, packed: Tensor, out: Tensor) -> None:
    """packed uint8 [form.nbytes] → out bf16 [form.numel], exact to the bit.

    In a CUDA graph, a replay decodes the contents of the buffer at that time, with its bases and patches.
    """
    assert packed.numel() == form.nbytes and out.numel() == form.numel and out.dtype == torch.bfloat16
    unpack_units(form, range(len(form.units)), packed, out)
    if form.matrices < form.numel:
        out[form.matrices :].copy_(form.verbatim_view(packed))


def unpack_units(form: PackedForm, numbers: Iterable[int], packed: Tensor, out: Tensor) -> None:
    """Writes these units to their places in out, like `unpack`. In other units it writes patches, and behind
    the units nothing."""
    head, sm, nibbles = form.head_view(packed), form.sm_view(packed), form.nibbles_view(packed)
    for number in numbers:
        unit = form.units[number]
        pairs = unit.numel // 2
        unpack_kernel[(triton.cdiv(pairs, PAIRS),)](
            sm[unit.offset :], nibbles[unit.offset // 2 :], head[FIRST_BASE:], out[unit.offset :], number, pairs,
            PAIRS=PAIRS, PLAINLY=INTERPRETED, num_warps=WARPS,
        )  # fmt: skip
    patch_kernel[(triton.cdiv(form.capacity, PATCHES),)](
        form.patches_view(packed), head, out.view(torch.int16), form.capacity, form.matrices,
        PATCHES=PATCHES, num_warps=4,
    )  # fmt: skip
