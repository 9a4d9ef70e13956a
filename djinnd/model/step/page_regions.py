"""Typed views of the regions of a pool's pages. The layout itself is KvLayout's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

from djinn_client.protocol.fields.kv_layout import BlockKv, KvDtype, KvLayout, Region


def layout_of(dtype: torch.dtype, page_size: int, shapes: Sequence[BlockKv], state_bytes: int = 0) -> KvLayout:
    """The layout of pages with KV of `dtype`."""
    return KvLayout.of(cast(KvDtype, str(dtype).removeprefix("torch.")), page_size, shapes, state_bytes)


def kv_regions(pool: Tensor, layout: KvLayout) -> list[tuple[Tensor, Tensor] | None]:
    """The views of each block's keys and values, [pages, page_size, heads, width] each; None: the block has no KV. A
    block that shares KV has the views of the other block. pool: uint8 [pages, page_bytes], contiguous."""
    elements = pool.view(getattr(torch, layout.dtype))
    return [
        None if pair is None else (_region(elements, layout, pair[0]), _region(elements, layout, pair[1]))
        for pair in layout.regions
    ]


def _region(elements: Tensor, layout: KvLayout, region: Region) -> Tensor:
    first, rest = divmod(region.offset, elements.itemsize)
    assert rest == 0
    count = layout.page_size * region.heads * region.width
    return elements[:, first : first + count].unflatten(1, (layout.page_size, region.heads, region.width))
