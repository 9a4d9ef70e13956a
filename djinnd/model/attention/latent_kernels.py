"""Latent attention by kernels: rows with few tokens by absorption, rows with many over expanded keys and values.

Absorption multiplies about three times as many numbers for a score, and saves an expansion of all tokens of a session,
which pays for few queries. For many queries, keys and values are expanded for some heads at a time, so that memory
stays bounded. They are put into pages of their own, and kernels/attention/mixed.py gets each head as a row:

    keys    [heads at a time * pages, EXPANDED_PAGE, 1, plain + rotary]
    values  [heads at a time * pages, EXPANDED_PAGE, 1, value]

Importing this needs Triton, which comes with CUDA builds of torch.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from djinnd.model.attention.absorption import Absorption
from djinnd.model.attention.gathering import gather_tokens
from djinnd.model.attention.latents import Latents
from djinnd.model.attention.worklist import EXTENT
from djinnd.model.kernels.attention.latent_decode import latent_decode
from djinnd.model.kernels.attention.mixed import mixed
from djinnd.model.kernels.launching.scratch import Scratch
from djinnd.model.paged_batch import PagedBatch, Softmax
from djinnd.model.tuning import EXPANDED_BYTES, EXPANDED_PAGE, EXPANDED_TOKENS


@dataclass(frozen=True, slots=True)
class LatentKernels:
    """One call of attention over a block's pages of latents and rotary keys, [pages, page_size, 1, width] each. The
    methods raise the errors in UNAVAILABLE (kernels/launching/launches.py)."""

    pages: tuple[Tensor, Tensor]
    softmax: Softmax
    latents: Latents
    scratch: Scratch

    @property
    def absorption(self) -> Absorption:
        assert self.latents.absorption is not None
        return self.latents.absorption

    def few(self, q: Tensor, batch: PagedBatch) -> Tensor:
        """q [tokens, heads, width] of rows with up to MAX_QUERY tokens → [tokens, heads, value width]."""
        absorption, matrix = self.absorption, self.latents.matrix
        over_latents, over_rotary = absorption.query(q, matrix)
        summed = torch.empty_like(over_latents, memory_format=torch.contiguous_format)
        latent_decode(over_latents, over_rotary, *self.pages, batch, summed, self.scratch, self.softmax)
        return absorption.output(summed, matrix)

    def many(self, q: Tensor, table: Tensor, length: int) -> Tensor:
        """q [queries, heads, width], the last tokens of a session of `length` → [queries, heads, value width]. table:
        int32 [pages], the session's pages."""
        absorption, heads = self.absorption, q.shape[1]
        pages = -(-length // EXPANDED_PAGE)
        widths = absorption.plain + absorption.rotary, absorption.value
        of_head = pages * EXPANDED_PAGE * sum(widths) * q.element_size()
        at_once = min(max(EXPANDED_BYTES // of_head, 1), heads)
        keys, values = (q.new_empty(at_once * pages, EXPANDED_PAGE, 1, width) for width in widths)
        out = q.new_empty(len(q), heads, absorption.value)
        for first in range(0, heads, at_once):
            some = slice(first, min(first + at_once, heads))
            count = some.stop - some.start
            spans = [x.view(at_once, pages * EXPANDED_PAGE, -1)[:count, :length] for x in (keys, values)]
            self._expand(some, table, *spans)
            own, found = (q.new_empty(count * len(q), 1, width) for width in widths)
            own.view(count, len(q), -1).copy_(q[:, some].transpose(0, 1))
            batch = heads_as_rows(count, len(q), length, q.device)
            mixed(own, keys, values, batch, found, self.scratch, self.softmax)
            out[:, some] = found.view(count, len(q), -1).transpose(0, 1)
        return out

    def _expand(self, heads: slice, table: Tensor, keys: Tensor, values: Tensor) -> None:
        """Writes keys and values [heads, length, width] of some heads."""
        absorption, matrix, length = self.absorption, self.latents.matrix, keys.shape[1]
        of_keys = absorption.keys_part(matrix)[heads].transpose(1, 2)
        of_values = absorption.values_part(matrix)[heads].transpose(1, 2)
        for start in range(0, length, EXPANDED_TOKENS):
            at = torch.arange(start, min(start + EXPANDED_TOKENS, length), device=table.device)
            latents, rotary = (gather_tokens(x, table, at, keys.dtype)[:, 0] for x in self.pages)
            span = slice(start, start + len(at))
            keys[:, span, : absorption.plain] = latents @ of_keys
            keys[:, span, absorption.plain :] = rotary
            values[:, span] = latents @ of_values


def heads_as_rows(heads: int, queries: int, length: int, device: torch.device) -> PagedBatch:
    """The batch in which each head is a row of `queries` tokens, with pages one after another. Nothing waits for the
    device. Only kernels/attention/mixed.py can read it: there are no slots."""
    rows = torch.arange(heads, dtype=torch.int32, device=device)
    pages = -(-length // EXPANDED_PAGE)
    ones = torch.ones_like(rows)
    extent = ones.new_full((EXTENT,), heads)
    extent[1:2].fill_(queries)
    return PagedBatch(
        query_starts=torch.arange(heads + 1, dtype=torch.int32, device=device) * queries,
        kv_lengths=ones * length,
        page_table=torch.arange(heads * pages, dtype=torch.int32, device=device).view(heads, pages),
        worklist=torch.stack([rows, rows * queries, ones * queries, ones * length], 1),
        extent=extent,
        slots=rows[:0].long(),
        max_query=queries,
        max_kv=length,
        fresh=False,
    )


def rehearse_expanded(tokens: int, like: Tensor, batch: PagedBatch, kernels: LatentKernels) -> None:
    """Launches what `many` launches for a batch with these bounds and without rows. tokens: of all heads at a time.
    like: has the type of queries."""
    absorption = kernels.absorption
    widths = absorption.plain + absorption.rotary, absorption.value
    keys, values = (like.new_zeros(1, EXPANDED_PAGE, 1, width) for width in widths)
    q, out = (like.new_zeros(tokens, 1, width) for width in widths)
    mixed(q, keys, values, batch, out, kernels.scratch, kernels.softmax)
