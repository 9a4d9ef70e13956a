"""The values that attention over paged KV takes, in PyTorch (attention/) and in the kernels (kernels/): where a batch's
tokens are in the pages, and the family's softmax."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from djinnd.model.adapter_rows import AdapterRows

T = TypeVar("T")


@dataclass(slots=True)
class PagedBatch:
    """Positions of a flattened batch's tokens in the paged KV.

    The tensors are on the device; a captured graph keeps their addresses. A row's queries are the last tokens of its
    KV: of n queries with `length` keys, query i is at position length - n + i.
    """

    query_starts: Tensor  # int32 [rows + 1], cumulative token counts
    kv_lengths: Tensor  # int32 [rows], tokens in KV including this step's
    page_table: Tensor  # int32 [rows, max_pages], page ids
    worklist: Tensor  # int32 [rows, 4]: see attention/worklist.py
    extent: Tensor  # int32 [4]: see attention/worklist.py
    slots: Tensor  # int64 [tokens], page * page_size + offset of each token of the batch
    max_query: int  # tokens of the longest row
    max_kv: int  # bound on kv_lengths; in a captured graph the model's maximum
    fresh: bool  # every row starts at position 0, so that there is no history to read
    adapters: AdapterRows | None = None  # None: no token has an adapter
    # int32 [rows, 2]: the pages with the states before and after each row's token (kernels/states/slots.py). None: the
    # model keeps no states, or some row has several tokens.
    states: Tensor | None = None
    _read: tuple[list[int], list[int]] | None = field(default=None, init=False)
    _pages: list[list[int]] | None = field(default=None, init=False)
    _derived: dict[Hashable, Any] = field(default_factory=dict, init=False)

    def on_host(self) -> tuple[list[int], list[int]]:
        """Copies `query_starts` and `kv_lengths`, once. The first call waits for the device."""
        if self._read is None:
            self._read = self.query_starts.tolist(), self.kv_lengths.tolist()
        return self._read

    def pages_on_host(self) -> list[list[int]]:
        """Copies `page_table`, once. The first call waits for the device."""
        if self._pages is None:
            self._pages = self.page_table.tolist()
        return self._pages

    def derived(self, key: Hashable, make: Callable[[], T]) -> T:
        """Returns the result of `make`, which is called once for all blocks of the step. `key`: all that it depends on
        beside the rows' lengths and pages, which stay the same during the step."""
        if key not in self._derived:
            self._derived[key] = make()
        made: T = self._derived[key]
        return made

    def singles(self, rows: Tensor, longest: int) -> PagedBatch:
        """The batch of some rows with one token each, for attention. rows: int64 [n]. longest: the most tokens in KV of
        any of them."""
        starts = torch.arange(len(rows) + 1, dtype=torch.int32, device=rows.device)
        table, lengths = self.page_table[rows], self.kv_lengths[rows]
        return replace(
            self, query_starts=starts, kv_lengths=lengths, page_table=table, max_query=1, max_kv=longest, fresh=False
        )


@dataclass(frozen=True, slots=True)
class Softmax:
    """A family's variant of softmax attention."""

    scale: float  # positive factor of the scores
    window: int = 0  # how many tokens a query sees, including itself; 0: all tokens before it
    softcap: float = 0.0  # scores become softcap * tanh(score / softcap) (Gemma 2); 0: scores are unchanged
    sinks: Tensor | None = None  # [heads]: a logit more in the denominator of the softmax, without a value (gpt-oss)
    # Tokens of a chunk: a query sees its own chunk, up to itself (Llama 4). 0: no chunks. There is no window then.
    chunk: int = 0

    @property
    def is_plain(self) -> bool:
        """True if only the window or the chunks differ from ordinary causal attention."""
        return not self.softcap and self.sinks is None

    def first_seen(self, length: int) -> int:
        """The first position that the last one of `length` tokens sees."""
        if self.chunk:
            return (length - 1) // self.chunk * self.chunk
        return max(length - self.window, 0) if self.window else 0

    def is_causal_only(self, length: int) -> bool:
        """True if rows of `length` tokens have ordinary causal attention."""
        return self.is_plain and not 0 < (self.window or self.chunk) < length
