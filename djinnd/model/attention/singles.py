"""Attention of rows with one token, in PyTorch: rows that see about as many tokens are computed in one call.

    row sees 150   ━━━━━━━━━━━━━━━┄      padded to 160: behind what it sees, its last token is read again, and masked
    row sees 157   ━━━━━━━━━━━━━━━╍
    row sees 900   ━━━━━━━━━━ ⋯ ━━━━┄    padded to 1,024, in a call of its own

The length to which a row is padded follows from the row alone, and torch's attention computes each row of a call by
itself. So no row's result depends on the other rows of the step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from djinnd.model.attention.chunks import attend_in_steps
from djinnd.model.attention.gathering import Units, units_of
from djinnd.model.paged_batch import PagedBatch, Softmax
from djinnd.model.tuning import KEYS_AT_ONCE, LENGTHS_PER_DOUBLING, SHORTEST_STEP


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are computed in one call, each padded to the same number of keys."""

    tokens: Tensor | None  # int64 [rows]: their tokens in the batch. None: they are all tokens of the batch, in order
    of_keys: Tensor  # int64: the units of their keys, row by row (Units.places)
    of_values: Tensor
    seen: Tensor  # bool [rows, 1, 1, keys]
    bias: Tensor  # of the queries' dtype, like `seen`: 0 where seen, -inf elsewhere


def attend_singles(q: Tensor, keys: Tensor, values: Tensor, batch: PagedBatch, softmax: Softmax, out: Tensor) -> None:
    """Computes the rows of the batch that have one token, into `out` [tokens, heads, value width].

    q: [tokens, heads, width]. keys, values: a block's pages, [pages, page_size, kv_heads, width].
    """
    units = units_of(keys), units_of(values)
    key = (softmax.window, softmax.chunk, keys.shape[1], units, q.dtype)
    groups = batch.derived(key, lambda: list(_groups(batch, keys.shape, units, softmax, q.dtype)))
    for group in groups:
        some = q if group.tokens is None else q.index_select(0, group.tokens)
        shape = (len(some), -1, keys.shape[2])
        k = units[0].take(keys, group.of_keys).to(q.dtype).view(*shape, keys.shape[3])
        v = units[1].take(values, group.of_values).to(q.dtype).view(*shape, values.shape[3])
        found = _attend(some, k.transpose(1, 2), v.transpose(1, 2), group, softmax)
        if group.tokens is None:
            out.view(found.shape).copy_(found)
        else:
            out.index_copy_(0, group.tokens, found.reshape(len(some), *out.shape[1:]))


def _attend(q: Tensor, k: Tensor, v: Tensor, group: Group, softmax: Softmax) -> Tensor:
    """q [rows, heads, width], k and v [rows, kv_heads, keys, width] → [rows, kv_heads, group, value width]."""
    # All heads of a group see the same keys, so they are passed as queries of their KV head.
    grouped = q.reshape(len(q), k.shape[1], -1, q.shape[2])
    if softmax.is_plain:
        return scaled_dot_product_attention(grouped, k, v, attn_mask=group.bias, scale=softmax.scale)
    return attend_in_steps(grouped.unsqueeze(3), k, v, group.seen.unsqueeze(2), softmax).squeeze(3)


def _groups(
    batch: PagedBatch, shape: torch.Size, units: tuple[Units, Units], softmax: Softmax, dtype: torch.dtype
) -> Iterator[Group]:
    """`shape`: of a block's pages of keys. `units`: of its keys and values. `dtype`: of its queries."""
    _, page_size, heads, width = shape
    starts, lengths = batch.on_host()
    device = batch.page_table.device
    rows_of = defaultdict[int, list[int]](list)
    for row, (start, end) in enumerate(pairwise(starts)):
        if end - start == 1:
            rows_of[padded(lengths[row] - softmax.first_seen(lengths[row]))].append(row)
    for keys, rows in rows_of.items():
        at_once = max(KEYS_AT_ONCE // (keys * heads * width), 1)
        for first in range(0, len(rows), at_once):
            some = rows[first : first + at_once]
            length = torch.tensor([lengths[row] for row in some], device=device)[:, None]
            seen_from = torch.tensor([softmax.first_seen(lengths[row]) for row in some], device=device)[:, None]
            at = seen_from + torch.arange(keys, device=device)
            seen = (at < length)[:, None, None]
            at = torch.minimum(at, length - 1)  # memory behind a row's tokens may hold NaN
            table = batch.page_table[torch.tensor(some, device=device)]
            of_keys, of_values = (each.places(table, at, page_size) for each in units)
            yield Group(
                None if len(some) == len(batch.slots) else torch.tensor([starts[row] for row in some], device=device),
                of_keys,
                of_values,
                seen,
                torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -math.inf),
            )


def padded(length: int) -> int:
    """The number of keys to which a row that sees `length` tokens is padded."""
    step = max((1 << (length - 1).bit_length()) // 2 // LENGTHS_PER_DOUBLING, SHORTEST_STEP)
    return -(-length // step) * step
