"""Connects transformers' attention modules to paged KV.

Transformers calls the function registered under `_attn_implementation` with q, k and v of the new tokens.
`paged_attention` finds the block's views of the pool on the module (`module.paged`, set at load), writes k and v to the
pages, and attends over the pages. No mask function is registered under this name, so transformers builds no masks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from djinnd.model.attention.latents import Latents
from djinnd.model.attention.paged import PagedAttention
from djinnd.model.fp8 import FP8
from djinnd.model.paged_batch import PagedBatch, Softmax

NAME = "djinn"

_KNOWN_TENSORS = {"position_ids", "cache_position"}  # arguments that the page table makes redundant


@dataclass(slots=True)
class AttentionContext:
    """The attention kernels and the running step's batch, shared by all blocks of a model."""

    kernels: PagedAttention
    batch: PagedBatch | None = None


@dataclass(slots=True)
class BlockKV:
    """The keys and values of one attention in the device pool: [pages, page_size, kv_heads, width], strided views."""

    context: AttentionContext
    keys: Tensor
    values: Tensor
    latents: Latents | None = None  # the keys are latents and the values rotary keys
    is_shared: bool = False  # an earlier block has written them
    calls: int = 0  # the check at load requires exactly one a step


@dataclass(frozen=True, slots=True)
class Wanted:
    """The tensors and options with which a family's module calls attention."""

    module: nn.Module
    key: Tensor  # [1, kv_heads, tokens, width], like `value`
    value: Tensor
    window: int  # 0: none
    unserved: str  # arguments that paged attention does not support; "": none
    chunk: int = 0  # 0: no chunks


class NoMask:
    """Takes the place of a mask that a family's forward slices before it calls attention."""

    def __getitem__(self, part: object) -> NoMask:
        return self


class NoPages(Exception):
    """Raised by `paged_attention` if the module has no pages yet. `wanted` describes the call."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__("attention was called before there were pages")
        self.wanted = wanted


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | NoMask | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, width], key and value [1, kv_heads, tokens, width] → [1, tokens, heads, value width].

    Signature and names are transformers' attention interface. The size of chunks is not among its arguments: the module
    has it as `attention_chunk`.
    """
    if isinstance(attention_mask, NoMask):
        attention_mask = None
    chunk: int = getattr(module, "attention_chunk", 0)
    paged: BlockKV | None = getattr(module, "paged", None)
    if paged is None:
        unserved = _unserved(module, attention_mask, kwargs)
        raise NoPages(Wanted(module, key, value, sliding_window or 0, unserved, chunk))
    assert attention_mask is None and dropout == 0.0
    batch = paged.context.batch
    assert batch is not None
    paged.calls += 1
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    kernels, is_expanded = paged.context.kernels, True
    if paged.latents is not None:
        is_expanded = paged.latents.is_expanded
        latents, rotary = (x[0].transpose(0, 1) for x in paged.latents.take())
        kernels.write(latents, rotary, paged.keys, paged.values, batch)
    elif not paged.is_shared:
        kernels.write(k, v, paged.keys, paged.values, batch)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    softmax = Softmax(scale, sliding_window or 0, softcap or 0.0, s_aux, chunk)
    is_rounded = paged.latents is None and paged.keys.dtype is FP8
    own_k, own_v = (None, None) if paged.is_shared or not is_expanded or is_rounded else (k, v)
    out = kernels.attend(q, own_k, own_v, paged.keys, paged.values, batch, softmax, paged.latents)
    return out.unsqueeze(0), None


def _unserved(module: nn.Module, mask: Tensor | None, arguments: dict[str, Any]) -> str:
    """Names the features of a call beyond causal attention, with or without a window; "" if there are none."""
    unknown = [name for name, value in arguments.items() if isinstance(value, Tensor) and name not in _KNOWN_TENSORS]
    if mask is not None:
        unknown.append("a mask of its own")
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("attention to later tokens")
    return ", ".join(unknown)


def install() -> None:
    AttentionInterface.register(NAME, paged_attention)
