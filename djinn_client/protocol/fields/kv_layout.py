"""How the KV of a session lies in a window: the pages of the daemon's pool, one after another.

    │ page 0 │ page 1 │ … │ page n-1 │      each [blocks, 2, page_size, kv_heads, head_dim], row-major; K, then V

Token i is in page i // page_size, there at i % page_size. The rest of the last page is undefined.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from djinn_client.protocol.fields.image import Dtype

ITEM_BYTES: dict[Dtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2}


Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)]


class KvLayout(msgspec.Struct, frozen=True):
    dtype: Dtype
    blocks: Count
    page_size: Count  # tokens
    kv_heads: Count
    head_dim: Count

    @property
    def page_bytes(self) -> int:
        return self.blocks * 2 * self.page_size * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def nbytes(self, tokens: int) -> int:
        return self.pages(tokens) * self.page_bytes

    def shape(self, tokens: int) -> tuple[int, ...]:
        """[pages, blocks, 2, page_size, kv_heads, head_dim]"""
        return (self.pages(tokens), self.blocks, 2, self.page_size, self.kv_heads, self.head_dim)

    def __str__(self) -> str:
        return (
            f"{self.dtype} pages of {self.page_size} tokens with {self.blocks} blocks, {self.kv_heads} heads and "
            f"{self.head_dim} values a head"
        )
