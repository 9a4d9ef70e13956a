from __future__ import annotations

import torch
from torch import Tensor

from djinnd.kvcache.manager import page_size_for
from djinnd.kvcache.tuning import MOST_STATE_TOKENS
from djinnd.model.paged_batch import PagedBatch
from djinnd.model.states.segments import Segment, cut


def batch_of(rows: list[tuple[int, int, list[int]]]) -> PagedBatch:
    """Rows of (tokens in KV, tokens in this step, pages)."""

    def ints(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32)

    counts = [count for _, count, _ in rows]
    starts = [sum(counts[:row]) for row in range(len(rows) + 1)]
    width = max(len(pages) for *_, pages in rows)
    table = torch.tensor([pages + [0] * (width - len(pages)) for *_, pages in rows], dtype=torch.int32)
    lengths = ints([length for length, *_ in rows])
    slots = torch.zeros(starts[-1], dtype=torch.int64)
    return PagedBatch(ints(starts), lengths, table, ints([]), ints([]), slots, max(counts), max(lengths), fresh=False)


def test_rows_are_cut_at_the_ends_of_pages() -> None:
    segments = cut(batch_of([(20, 14, [5, 3, 9]), (8, 8, [7])]), page_size=8)
    assert segments.longer == [Segment(0, 2, 5, 5), Segment(2, 8, 5, 3), Segment(10, 4, 3, 9), Segment(14, 8, None, 7)]
    assert segments.singles is not None and len(segments.singles) == len(segments.slots) == 0


def test_rows_of_one_token_go_together() -> None:
    segments = cut(batch_of([(1, 1, [4]), (9, 1, [6, 2]), (3, 2, [8]), (10, 1, [6, 2])]), page_size=8)
    assert segments.singles is not None and segments.singles.tolist() == [0, 1, 4]
    assert segments.slots.tolist() == [[-1, 4], [6, 2], [2, 2]]
    assert segments.longer == [Segment(2, 2, 8, 8)]


def test_pages_with_states_have_about_as_much_kv() -> None:
    assert page_size_for(20 << 10, 63 << 20) == 4096  # Qwen3.6-35B-A3B's shape
    assert page_size_for(20 << 10, 3 << 20) == page_size_for(20 << 10) == 256
    assert page_size_for(1 << 20, 3 << 20) == 16
    assert page_size_for(0, 3 << 20) == MOST_STATE_TOKENS
