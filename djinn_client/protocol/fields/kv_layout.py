"""How the KV of a session lies in a window: the pages of the daemon's pool, one after another.

    │ page 0 │ page 1 │ … │ page n-1 │

    a page:  │ K of block 0 │ V of block 0 │ K of block 1 │ V of block 1 │ … │ state │
             └──────────────┴─ each [page_size, heads, width], row-major ─────┘

Heads and widths may differ between blocks, and the widths of K and V too. A block may have no KV, or may attend to the
KV of an earlier block. The state is what a hybrid model keeps beside its KV; most models have none. Page sizes are
multiples of 16, so every region begins at a multiple of ALIGNMENT bytes without padding; the state is padded to one.

If all blocks are alike, a page is [blocks, 2, page_size, kv_heads, head_dim].

Token i is in page i // page_size, there at i % page_size. The rest of the last page is undefined.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Annotated, Literal, NamedTuple

import msgspec

KvDtype = Literal["float32", "bfloat16", "float16", "float8_e4m3fn"]

FP8: KvDtype = "float8_e4m3fn"
ITEM_BYTES: dict[KvDtype, int] = {"float32": 4, "bfloat16": 2, "float16": 2, FP8: 1}
LARGEST: dict[KvDtype, float] = {FP8: 448.0}  # numbers beyond it become this
ALIGNMENT = 16  # bytes: the widest access of a GPU's thread

MOST_BLOCKS = 4096  # in `shapes`: a request with more is refused before it is read

Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 24)]
CountOrNone = Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]


class BlockShape(msgspec.Struct, frozen=True, array_like=True):
    """Shape of one token's keys and values in one block. In a model with latent attention (MLA), the keys are the
    latents and the values are the rotary part of the keys, as the family's own cache has them."""

    heads: Count
    key_width: Count
    value_width: Count

    @property
    def elements(self) -> int:
        return self.heads * (self.key_width + self.value_width)


BlockKv = BlockShape | CountOrNone | None  # a shape; the block with the KV that this one attends to; no KV


class Region(NamedTuple):
    """A part of a page: [page_size, heads, width] from byte `offset` on."""

    offset: int
    heads: int
    width: int


class KvLayout(msgspec.Struct, frozen=True, omit_defaults=True, dict=True):
    """`kv_heads` and `head_dim` are 0 if the blocks are not alike; `shapes` then has an entry for each block. (LongCat
    Flash has two attentions in a block, so two entries.)"""

    dtype: KvDtype  # of keys and values; a state has the dtype of computing
    blocks: Count
    page_size: Count  # tokens
    kv_heads: CountOrNone
    head_dim: CountOrNone
    shapes: Annotated[tuple[BlockKv, ...], msgspec.Meta(max_length=MOST_BLOCKS)] = ()
    state_bytes: Annotated[int, msgspec.Meta(ge=0, lt=1 << 40)] = 0  # of the state in a page

    @classmethod
    def of(cls, dtype: KvDtype, page_size: int, shapes: Sequence[BlockKv], state_bytes: int = 0) -> KvLayout:
        """The layout of a model with the KV `shapes`, one for each block. Without any, the model has states only."""
        if not shapes:
            return cls(dtype, 1, page_size, 0, 0, (None,), state_bytes)
        first = shapes[0]
        if isinstance(first, BlockShape) and first.key_width == first.value_width and set(shapes) == {first}:
            return cls(dtype, len(shapes), page_size, first.heads, first.key_width, (), state_bytes)
        return cls(dtype, len(shapes), page_size, 0, 0, tuple(shapes), state_bytes)

    def __post_init__(self) -> None:
        if self.shapes:
            alike = self.kv_heads == self.head_dim == 0
            if not alike or len(self.shapes) != self.blocks:
                raise ValueError("shapes are for blocks that are not alike, one for each block")
            for index, shape in enumerate(self.shapes):
                if isinstance(shape, int) and not (shape < index and isinstance(self.shapes[shape], BlockShape)):
                    raise ValueError(f"block {index} shares the KV of block {shape}, which has none before it")
        elif not self.kv_heads or not self.head_dim:
            raise ValueError("blocks without shapes must be alike: kv_heads and head_dim are missing")

    @property
    def is_uniform(self) -> bool:
        """True if a page is [blocks, 2, page_size, kv_heads, head_dim], perhaps with a state behind it."""
        return not self.shapes

    @property
    def block_shapes(self) -> Sequence[BlockKv]:
        """The KV of each block, also of blocks that are alike."""
        return self.shapes or (BlockShape(self.kv_heads, self.head_dim, self.head_dim),) * self.blocks

    @cached_property
    def regions(self) -> list[tuple[Region, Region] | None]:
        """The regions of each block's K and V; None: it has none. A block that shares KV has the regions of the
        other block."""
        found: list[tuple[Region, Region] | None] = []
        offset, values = 0, self.page_size * ITEM_BYTES[self.dtype]
        for shape in self.block_shapes:
            if isinstance(shape, BlockShape):
                key = Region(offset, shape.heads, shape.key_width)
                value = Region(offset + values * key.heads * key.width, shape.heads, shape.value_width)
                offset = value.offset + values * value.heads * value.width
                found.append((key, value))
            else:
                found.append(None if shape is None else found[shape])
        return found

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's KV in all blocks."""
        if self.shapes:
            return token_bytes(self.shapes, ITEM_BYTES[self.dtype])
        return self.blocks * 2 * self.kv_heads * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def state_offset(self) -> int:
        """Byte of a page at which its state begins: behind the KV of all blocks."""
        kv = self.page_size * self.token_bytes
        return aligned(kv) if self.state_bytes else kv

    def first_byte(self, block: int) -> int:
        """Byte of a page at which the KV of the blocks from `block` on begins."""
        if not self.shapes:
            return block * self.page_size * self.token_bytes // self.blocks
        return self.page_size * token_bytes(self.shapes[:block], ITEM_BYTES[self.dtype])

    @property
    def page_bytes(self) -> int:
        return self.state_offset + aligned(self.state_bytes)

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def nbytes(self, tokens: int) -> int:
        return self.pages(tokens) * self.page_bytes

    def shape(self, tokens: int) -> tuple[int, ...]:
        """[pages, blocks, 2, page_size, kv_heads, head_dim] if all blocks are alike and there is no state, or else
        [pages, elements of a page]."""
        pages = self.pages(tokens)
        if self.is_uniform and not self.state_bytes:
            return (pages, self.blocks, 2, self.page_size, self.kv_heads, self.head_dim)
        return (pages, self.page_bytes // ITEM_BYTES[self.dtype])

    def __str__(self) -> str:
        told = f"{self.dtype} pages of {self.page_size} tokens with {self.blocks} blocks"
        if self.is_uniform:
            told += f", {self.kv_heads} heads and {self.head_dim} values a head"
        else:
            told += f" that are not alike, {self.state_offset:,} bytes of KV"
        return told + (f", and {self.state_bytes:,} bytes of state" if self.state_bytes else "")


def token_bytes(shapes: Sequence[BlockKv], itemsize: int) -> int:
    """Bytes of one token's KV in all blocks."""
    return sum(shape.elements for shape in shapes if isinstance(shape, BlockShape)) * itemsize


def aligned(nbytes: int) -> int:
    """`nbytes`, rounded up to a multiple of ALIGNMENT."""
    return nbytes + -nbytes % ALIGNMENT
