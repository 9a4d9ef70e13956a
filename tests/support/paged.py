"""Sessions in a page-major pool, a plain implementation of attention over them, and the check that both agree.

The pool is NaN wherever no session of the scene has a token. Reading another page, another block, or past a session's
end gives NaN. Writing outside the slots of the step is detected by comparing bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from djinnd.model.attention.paged import PagedAttention
from djinnd.model.attention.worklist import EXTENT, FIELDS, fill_worklist
from djinnd.model.paged_batch import PagedBatch, Softmax

BLOCKS, BLOCK = 3, 1
TOLERANCE = {  # relative and absolute; softmax weights are rounded to the type before the product with the values
    torch.float32: 1e-5,
    torch.float16: 3e-3,
    torch.bfloat16: 2e-2,
}


@dataclass
class Scene:
    """Row i brings `counts[i]` tokens to a session of then `lengths[i]`. `padding` rows have no session."""

    counts: list[int]
    lengths: list[int]
    page_size: int = 16
    kv_heads: int = 2
    group: int = 1
    head_dim: int = 64
    value_dim: int = 0  # 0: as wide as the keys
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    kv_dtype: torch.dtype | None = None  # of the pages; None: as `dtype`
    padding: int = 0
    width: int = 0  # pages in a row of the table; 0: as many as the longest session needs
    pool: Tensor = field(init=False)  # [pages, elements of all blocks], of which `keys` and `values` are views

    def __post_init__(self) -> None:
        pages = [-(-length // self.page_size) for length in self.lengths]
        rows = len(self.counts) + self.padding
        order = (torch.randperm(sum(pages) + 2) + 1).tolist()  # page 0 is the scratch page
        self.table = torch.zeros(rows, self.width or max(pages), dtype=torch.int32)
        self.value_dim = self.value_dim or self.head_dim
        pool = self._empty_pool(sum(pages) + 3)
        slots: list[int] = []
        for row, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            mine = [order.pop() for _ in range(pages[row])]
            self.table[row, : len(mine)] = torch.tensor(mine)
            places = [(mine[i // self.page_size], i % self.page_size) for i in range(length)]
            for page, offset in places[: length - count]:
                for x in self._views(pool):
                    x[page, offset] = torch.randn(x.shape[2:]).to(x.dtype)
            slots += [page * self.page_size + offset for page, offset in places[length - count :]]
        self.tokens = len(slots)
        self.slots = torch.tensor(slots + [0] * self.padding)
        total = len(self.slots)
        self.q = self._as_transformers_gives(total, self.kv_heads * self.group, self.head_dim)
        self.k, self.v = (
            self._as_transformers_gives(total, self.kv_heads, width) for width in (self.head_dim, self.value_dim)
        )
        self.table, self.slots, self.pool = (x.to(self.device) for x in (self.table, self.slots, pool))

    def _empty_pool(self, pages: int) -> Tensor:
        token = self.kv_heads * (self.head_dim + self.value_dim)
        return torch.full((pages, BLOCKS * self.page_size * token), float("nan")).to(self.kv_dtype or self.dtype)

    @property
    def keys(self) -> Tensor:
        return self._views(self.pool)[0]

    @property
    def values(self) -> Tensor:
        return self._views(self.pool)[1]

    def _views(self, pool: Tensor) -> tuple[Tensor, Tensor]:
        """The keys and values of BLOCK, [pages, page_size, kv_heads, width]."""
        keys, values = (self.page_size * self.kv_heads * width for width in (self.head_dim, self.value_dim))
        own = pool.unflatten(1, (BLOCKS, -1))[:, BLOCK]
        parts = own.split((keys, values), 1)
        shape = (self.page_size, self.kv_heads, -1)
        return parts[0].unflatten(1, shape), parts[1].unflatten(1, shape)

    def _as_transformers_gives(self, tokens: int, heads: int, width: int) -> Tensor:
        """[tokens, heads, width], a view of [1, heads, tokens, width]."""
        x = torch.randn(1, heads, tokens, width, device=self.device).to(self.dtype)
        return x[0].transpose(0, 1)

    def batch(self, *, max_kv: int | None = None, fresh: bool = False) -> PagedBatch:
        starts = torch.tensor([0, *self.counts, *[1] * self.padding]).cumsum(0).int()
        lengths = torch.tensor([*self.lengths, *[1] * self.padding], dtype=torch.int32)
        worklist, extent = (torch.zeros(shape, dtype=torch.int32) for shape in ((len(lengths), FIELDS), (EXTENT,)))
        fill_worklist(starts.numpy(), lengths.numpy(), worklist.numpy(), extent.numpy())
        return PagedBatch(
            query_starts=starts.to(self.device),
            kv_lengths=lengths.to(self.device),
            page_table=self.table,
            worklist=worklist.to(self.device),
            extent=extent.to(self.device),
            slots=self.slots,
            max_query=max(self.counts),
            max_kv=max_kv or max(self.lengths),
            fresh=fresh,
        )

    def written(self) -> Tensor:
        """The pool as it must be after this step's keys and values are written; the scratch page does not count."""
        pool = self.pool.clone()
        for token, slot in enumerate(self.slots[: self.tokens].tolist()):
            page, offset = divmod(slot, self.page_size)
            for view, own in zip(self._views(pool), (self.k, self.v), strict=True):
                view[page, offset] = own[token] if self.kv_dtype is None else saturated(own[token])
        return pool

    def reference(self, pool: Tensor, softmax: Softmax) -> Tensor:
        """[tokens, heads, value_dim] in float64, row by row, from a pool that holds this step's tokens."""
        out, start = [], 0
        for row, (count, length) in enumerate(zip(self.counts, self.lengths, strict=True)):
            pages = self.table[row, : -(-length // self.page_size)].long()
            k, v = (view[pages].flatten(0, 1)[:length].double() for view in self._views(pool))
            k, v = (x.repeat_interleave(self.group, 1) for x in (k, v))
            scores = torch.einsum("qhd,khd->hqk", self.q[start : start + count].double(), k) * softmax.scale
            if softmax.softcap:
                scores = softmax.softcap * torch.tanh(scores / softmax.softcap)
            position = torch.arange(length - count, length, device=pool.device)[:, None]
            at = torch.arange(length, device=pool.device)
            seen = (at <= position) & (at > position - (softmax.window or length))
            if softmax.chunk:
                seen &= at >= position // softmax.chunk * softmax.chunk
            scores = scores.masked_fill(~seen, float("-inf"))
            if softmax.sinks is not None:
                scores = torch.cat([scores, softmax.sinks.double()[:, None, None].expand(-1, count, 1)], -1)
            out.append(torch.einsum("hqk,khd->qhd", scores.softmax(-1)[..., :length], v))
            start += count
        return torch.cat(out)


def saturated(x: Tensor) -> Tensor:
    """x in FP8, where numbers beyond 448 become 448."""
    return x.float().clamp(-448.0, 448.0).to(torch.float8_e4m3fn)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def check(attention: PagedAttention, scene: Scene, *, fresh: bool = False, **options: Any) -> None:
    """Writes and attends, and then compares every byte of the pool and the output of every token that is not
    padding."""
    softmax = Softmax(scene.head_dim**-0.5, **options)
    batch, wanted = scene.batch(fresh=fresh), scene.written()
    attention.write(scene.k, scene.v, scene.keys, scene.values, batch)
    assert same_bytes(scene.pool[1:], wanted[1:])
    own = (scene.k, scene.v) if scene.kv_dtype is None else (None, None)
    out = attention.attend(scene.q, *own, scene.keys, scene.values, batch, softmax)
    assert same_bytes(scene.pool[1:], wanted[1:])
    assert out.shape == (*scene.q.shape[:2], scene.value_dim) and out.dtype == scene.dtype and out.is_contiguous()
    tolerance = TOLERANCE[scene.dtype]
    reference = scene.reference(wanted, softmax)
    torch.testing.assert_close(out[: scene.tokens].double(), reference, rtol=tolerance, atol=tolerance)
