"""The seam between transformers' attention modules and our pages.

Transformers calls the function that is registered under `_attn_implementation` with the q, k and v of the new tokens.
Ours finds the block's place in the pool on the module (`module.paged`, put there at load), writes k and v into pages
and attends over them. No mask function is registered under this name: transformers then builds no mask at all.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from djinnd.model.attention import PagedAttention, PagedBatch

NAME = "djinn"

_KNOWN_TENSORS = {"position_ids", "cache_position"}  # what the page table says already


@dataclass(slots=True)
class AttentionContext:
    """Shared by all blocks of a model: the kernels, and where the tokens of the step that runs stand."""

    kernels: PagedAttention
    batch: PagedBatch | None = None


@dataclass(slots=True)
class BlockKV:
    """One block's keys and values in the device pool: [pages, page_size, kv_heads, head_dim], strided views."""

    context: AttentionContext
    keys: Tensor
    values: Tensor
    calls: int = field(default=0)  # audited by the check at load: exactly one a step


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a family's attention asks of ours."""

    kv_heads: int
    key_dim: int
    value_dim: int
    window: int  # 0: none
    unserved: str  # what else of its arguments ours would pass over in silence; "": nothing


class NoPages(Exception):
    """Raised in the place of attention while there are no pages; `wanted` is what was asked of it."""

    def __init__(self, wanted: Wanted) -> None:
        super().__init__("attention was called before there were pages")
        self.wanted = wanted


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, tokens, head_dim], key and value [1, kv_heads, tokens, head_dim] → [1, tokens, heads, head_dim].

    Signature and names are transformers' attention interface.
    """
    paged: BlockKV | None = getattr(module, "paged", None)
    if paged is None:
        unserved = _unserved(module, attention_mask, kwargs)
        raise NoPages(Wanted(key.shape[1], key.shape[3], value.shape[3], sliding_window or 0, unserved))
    assert attention_mask is None and dropout == 0.0
    batch = paged.context.batch
    assert batch is not None
    paged.calls += 1
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    kernels = paged.context.kernels
    kernels.write(k, v, paged.keys, paged.values, batch)
    out = kernels.attend(
        q,
        k,
        v,
        paged.keys,
        paged.values,
        batch,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        window=sliding_window or 0,
        softcap=softcap or 0.0,
        sinks=s_aux,
    )
    return out.unsqueeze(0), None


def _unserved(module: nn.Module, mask: Tensor | None, arguments: dict[str, Any]) -> str:
    """What a family wants of attention beyond a causal window over all earlier tokens."""
    unknown = [name for name, value in arguments.items() if isinstance(value, Tensor) and name not in _KNOWN_TENSORS]
    if mask is not None:
        unknown.append("a mask of its own")
    if arguments.get("is_causal") is False or getattr(module, "is_causal", True) is False:
        unknown.append("attention to later tokens")
    return ", ".join(unknown)


def install() -> None:
    AttentionInterface.register(NAME, paged_attention)
