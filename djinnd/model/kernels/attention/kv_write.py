"""Writes a step's keys and values to their pages in one launch."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from djinnd.model.fp8 import as_bytes
from djinnd.model.kernels.attention.fp8 import to_e4m3
from djinnd.model.kernels.attention.tile import block_strides, padded_width, width_options

ELEMENTS = 2048  # elements of k, and of v, that one program copies: two 16-byte accesses a thread


@triton.jit
def kv_write_kernel(
    k, v, keys, values, slots,
    k_token, k_head, v_token, v_head, key_page, key_token, key_head, value_page, value_token, value_head,
    KV_HEADS: tl.constexpr, PAGE: tl.constexpr, KEY: tl.constexpr, KEY_DIM: tl.constexpr, VALUE: tl.constexpr,
    VALUE_DIM: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """Writes HEADS heads of one token."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    key_dims, value_dims = tl.arange(0, KEY_DIM)[None, :], tl.arange(0, VALUE_DIM)[None, :]
    of_k = (head < KV_HEADS) & (key_dims < KEY)
    of_v = (head < KV_HEADS) & (value_dims < VALUE)
    slot = tl.load(slots + token)
    page, offset = slot // PAGE, slot % PAGE
    new_k = tl.load(k + token * k_token + head * k_head + key_dims, mask=of_k)
    new_v = tl.load(v + token * v_token + head * v_head + value_dims, mask=of_v)
    if keys.dtype.element_ty == tl.uint8:
        new_k, new_v = to_e4m3(new_k), to_e4m3(new_v)
    tl.store(keys + page * key_page + offset * key_token + head * key_head + key_dims, new_k, mask=of_k)
    tl.store(values + page * value_page + offset * value_token + head * value_head + value_dims, new_v, mask=of_v)


def kv_write(k: Tensor, v: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> None:
    """k, v [tokens, kv_heads, width] → keys, values [pages, page_size, kv_heads, width] at `slots` [tokens].
    Pages have the dtype of k and v, or FP8.

    Several tokens may have the same slot only if the slot is never read, such as one in the scratch page: it is not
    defined which token stays.
    """
    assert k.stride(2) == v.stride(2) == 1
    keys, values = as_bytes(keys), as_bytes(values)
    tokens, kv_heads, _ = k.shape
    heads = min(triton.next_power_of_2(kv_heads), max(1, ELEMENTS // padded_width(keys, values)))
    kv_write_kernel[(tokens, triton.cdiv(kv_heads, heads))](
        k, v, keys, values, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        *block_strides(keys), *block_strides(values),
        KV_HEADS=kv_heads, PAGE=keys.shape[1], HEADS=heads, num_warps=4,
        **width_options(keys, "KEY"), **width_options(values, "VALUE"),
    )  # fmt: skip
