"""Measurements of attention over paged KV. The sessions' pages lie scattered in a page-major pool."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from djinnd.model.attention.worklist import EXTENT, FIELDS, fill_worklist
from djinnd.model.kernels.attention.decode import AT_ONCE, decode
from djinnd.model.kernels.attention.kv_write import kv_write
from djinnd.model.kernels.attention.mixed import mixed
from djinnd.model.kernels.attention.tile import Tiles
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.paged_batch import PagedBatch, Softmax
from tools.bench.kernels.timing import (
    CHOSEN,
    COLD,
    DTYPE,
    HEAD_DIM,
    LLAMA_8B,
    LLAMA_13B,
    PAGE_SIZE,
    Case,
    Measured,
    variants,
)

LONGEST = 4096  # most tokens of a session
BOUND = 131_072  # most tokens that a captured decode step allows, as Llama-3.1-8B does
SCALE = HEAD_DIM**-0.5
SOFTMAX = Softmax(SCALE)
DECODE_TILES = [
    Tiles(16, keys, warps, stages)
    for keys, warps, stages in [(32, 4, 3), (32, 4, 4), (64, 4, 2), (64, 4, 3), (64, 4, 4), (64, 8, 3), (128, 4, 2)]
]
DECODE_SPLITS = (1, 2, 4, 8, 16, 32, 64)
PREFILL_TILES = [
    Tiles(rows, keys, warps, stages)
    for rows, keys, warps, stages in [
        (64, 64, 4, 2),
        (64, 64, 4, 3),
        (64, 128, 4, 2),
        (128, 32, 8, 3),
        (128, 64, 8, 2),
        (128, 64, 8, 3),
        (128, 64, 8, 4),
        (128, 128, 8, 2),
        (128, 64, 4, 2),
        (128, 128, 8, 3),
    ]
]


@dataclass(slots=True)
class Rows:
    """A step of sessions with scattered pages in a pool [pages, blocks, 2, page_size, kv_heads, head_dim]."""

    heads: int
    kv_heads: int
    counts: list[int]
    lengths: list[int]
    batch: PagedBatch = field(init=False)
    pool: Tensor = field(init=False)
    q: Tensor = field(init=False)
    out: Tensor = field(init=False)

    def __post_init__(self) -> None:
        starts = torch.tensor([0, *itertools.accumulate(self.counts)], dtype=torch.int32)
        lengths = torch.tensor(self.lengths, dtype=torch.int32)
        worklist, extent = (torch.zeros(shape, dtype=torch.int32) for shape in ((len(lengths), FIELDS), (EXTENT,)))
        fill_worklist(starts.numpy(), lengths.numpy(), worklist.numpy(), extent.numpy())
        rows, width = len(self.counts), math.ceil(max(self.lengths) / PAGE_SIZE)
        self.batch = PagedBatch(
            query_starts=starts.cuda(),
            kv_lengths=lengths.cuda(),
            page_table=torch.randperm(rows * width, device="cuda").int().view(rows, width),
            worklist=worklist.cuda(),
            extent=extent.cuda(),
            slots=torch.empty(0, dtype=torch.int64, device="cuda"),  # only kv_write reads slots
            max_query=max(self.counts),
            max_kv=max(self.lengths),
            fresh=False,
        )
        blocks = min(max(math.ceil(COLD / self.kv_bytes), 2), 32)
        shape = (rows * width, blocks, 2, PAGE_SIZE, self.kv_heads, HEAD_DIM)
        self.pool = torch.empty(shape, dtype=DTYPE, device="cuda").normal_()
        tokens = sum(self.counts)
        self.q = torch.randn(self.heads, tokens, HEAD_DIM, dtype=DTYPE, device="cuda").transpose(0, 1)
        self.out = torch.empty(tokens, self.heads, HEAD_DIM, dtype=DTYPE, device="cuda")

    def widen(self, tokens: int, max_kv: int) -> None:
        """Gives the step a graph's shape: room for so many tokens, and for a row as long as `max_kv`."""
        self.batch = replace(self.batch, max_query=tokens, max_kv=max_kv)
        self.q = torch.randn(self.heads, tokens, HEAD_DIM, dtype=DTYPE, device="cuda").transpose(0, 1)
        self.out = torch.empty(tokens, self.heads, HEAD_DIM, dtype=DTYPE, device="cuda")

    @property
    def kv_bytes(self) -> int:
        """KV bytes of one block."""
        return sum(self.lengths) * 2 * self.kv_heads * HEAD_DIM * DTYPE.itemsize

    @property
    def flops(self) -> int:
        """Floating-point operations: two products for each pair of a query and a key that it sees."""
        pairs = sum(n * (length - n) + n * (n + 1) // 2 for n, length in zip(self.counts, self.lengths, strict=True))
        return 4 * pairs * self.heads * HEAD_DIM

    @property
    def blocks(self) -> list[tuple[Tensor, Tensor]]:
        return [(self.pool[:, i, 0], self.pool[:, i, 1]) for i in range(self.pool.shape[1])]


def measure_decode(ceiling: float, sweep: bool) -> Iterator[Measured | None]:
    """Measures a captured decode step's attention by the kernel that serves so many rows, and by the one with a fixed
    grid."""
    alike = [("2,048 tokens", [2048] * sessions) for sessions in (1, 16, 64)] + [("544 tokens", [544] * 256)]
    uneven = [("100 to 4,000 tokens", [100 + 260 * i for i in range(16)])]
    for (heads, kv_heads), (what, lengths) in itertools.product((LLAMA_13B, LLAMA_8B), alike + uneven):
        rows = Rows(heads, kv_heads, [1] * len(lengths), lengths)
        rows.batch = replace(rows.batch, max_kv=BOUND)
        is_fixed = len(lengths) <= AT_ONCE
        case = Case("decode", f"{heads}/{kv_heads}, {len(lengths)} of {what}", rows.kv_bytes, "GB/s", ceiling)
        options: dict[str, dict[str, Any]] = {} if is_fixed else {"fixed grid": {"kernel": decode}}
        if sweep:
            options |= {f"{splits} splits": {"splits": splits} for splits in DECODE_SPLITS}
        if sweep and is_fixed:
            options |= {str(tiles): {"tiles": tiles} for tiles in DECODE_TILES}
        scratch = Scratch(rows.q.device)
        kernel = decode if is_fixed else mixed
        step = partial(by, rows.q, kernel=kernel, batch=rows.batch, out=rows.out, scratch=scratch, softmax=SOFTMAX)
        for variant, launches in variants(step, rows.blocks, options):
            yield case.measure(variant, launches)


def by(*tensors: Tensor, kernel: Callable[..., None], **arguments: Any) -> None:
    kernel(*tensors, **arguments)


def measure_prefill(sweep: bool) -> Iterator[Measured | None]:
    sizes = ((512, 512), (2048, 2048), (512, 2048))
    for (heads, kv_heads), (count, length) in itertools.product((LLAMA_13B, LLAMA_8B), sizes):
        rows = Rows(heads, kv_heads, [count], [length])
        case = Case("prefill", f"{heads}/{kv_heads}, {count} of {length} tokens", rows.flops, "TFLOP/s", None)
        contiguous = case.measure("contiguous", contiguous_attention(rows))
        yield contiguous
        case = replace(case, best=contiguous.rate if contiguous else None)
        step = partial(mixed, rows.q, batch=rows.batch, out=rows.out, scratch=Scratch(rows.q.device), softmax=SOFTMAX)
        for variant, launches in variants(
            step, rows.blocks, {str(tiles): {"tiles": tiles} for tiles in PREFILL_TILES if sweep}
        ):
            yield case.measure(variant, launches)


def measure_mixed(ceiling: float) -> Iterator[Measured | None]:
    """Measures decoding sessions with one chunk beside them, in the smallest shape that a graph has for both."""
    cases = [(3, 2000, 30, 16), (15, 500, 30, 16), (30, 300, 30, 64), (3, 2000, 400, 16), (60, 300, 400, 64)]
    for (heads, kv_heads), (singles, length, chunk, bucket) in itertools.product((LLAMA_13B, LLAMA_8B), cases):
        padding = bucket - singles - 1
        tokens = next(tokens for tokens in (64, 512) if tokens >= singles + chunk)
        rows = Rows(heads, kv_heads, [*[1] * singles, chunk, *[0] * padding], [length] * (singles + 1) + [0] * padding)
        rows.widen(tokens, LONGEST)
        name = f"{heads}/{kv_heads}, {singles} of {length} tokens, a chunk of {chunk} of as many"
        case = Case("mixed", name, rows.kv_bytes, "GB/s", ceiling)
        scratch = Scratch(rows.q.device)
        step = partial(mixed, rows.q, batch=rows.batch, out=rows.out, scratch=scratch, softmax=SOFTMAX)
        for variant, launches in variants(step, rows.blocks, {}):
            yield case.measure(variant, launches)


def contiguous_attention(rows: Rows) -> list[Callable[[], object]]:
    """The same attention over q, k, v that are not paged: several copies, so that none is in the cache.

    It is FlashAttention 2 in torch; SDPA has no causal mask for queries that come after a history.
    """
    queries, keys = rows.batch.max_query, rows.batch.max_kv
    shape = (keys, rows.kv_heads, HEAD_DIM)
    blocks = [[torch.randn(shape, dtype=DTYPE, device="cuda") for _ in "kv"] for _ in range(8)]
    if queries == keys:
        gqa = rows.heads != rows.kv_heads
        sdpa: Callable[..., object] = partial(scaled_dot_product_attention, is_causal=True, enable_gqa=gqa)
        return [partial(sdpa, *(x.transpose(0, 1).unsqueeze(0) for x in (rows.q, *block))) for block in blocks]
    q = rows.q.contiguous()
    ends = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in (queries, keys)]
    flash = partial(torch.ops.aten._flash_attention_forward, scale=SCALE)
    return [partial(flash, q, *block, *ends, queries, keys, 0.0, True, False) for block in blocks]


def measure_kv_write(ceiling: float) -> Iterator[Measured | None]:
    for tokens in (1, 16, 2048):
        rows = Rows(*LLAMA_13B, [tokens], [tokens])
        shape = (rows.kv_heads, tokens, HEAD_DIM)
        k, v = (torch.randn(shape, dtype=DTYPE, device="cuda").transpose(0, 1) for _ in "kv")
        slots = torch.randperm(rows.batch.page_table.numel() * PAGE_SIZE, device="cuda")[:tokens]
        case = Case("kv_write", f"{rows.kv_heads} heads, {tokens} tokens", 2 * rows.kv_bytes, "GB/s", ceiling)
        yield case.measure(CHOSEN, [partial(kv_write, k, v, *block, slots) for block in rows.blocks])
