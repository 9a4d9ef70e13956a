"""The rows of a batch as a step's inputs, and what the step gave in their order: pure functions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from djinnd.core.batch import Row
from djinnd.model.inputs import StepInputs
from djinnd.model.sampler import Sampled

Rows = Sequence[Row]

_NONE = range(0)


def compose(inputs: StepInputs, rows: Rows, table: npt.NDArray[np.int32], page_size: int) -> None:
    """Fills the host side of `inputs`, which may have room for more. `table` [rows, pages]: of the rows' sessions."""
    if all(row.count == 1 for row in rows):
        _compose_tokens(inputs, rows, table, page_size)
    else:
        _compose_chunks(inputs, rows, table, page_size)
    inputs.host["table"][: len(rows), : table.shape[1]] = table


def _compose_tokens(inputs: StepInputs, rows: Rows, table: npt.NDArray[np.int32], page_size: int) -> None:
    """What the other one does, where each row brings one token, in half as many calls of numpy: the device waits for
    them in every step that decodes."""
    host, count = inputs.host, len(rows)
    order, positions = np.arange(count + 1), np.array([row.start for row in rows])
    pages, offsets = np.divmod(positions, page_size)
    host["ids"][:count] = [row.session.tokens[row.start] for row in rows]
    host["positions"][:count] = positions
    host["slots"][:count] = table[order[:count], pages].astype(np.int64) * page_size + offsets
    host["starts"][: count + 1] = order
    host["lengths"][:count] = positions + 1


def _compose_chunks(inputs: StepInputs, rows: Rows, table: npt.NDArray[np.int32], page_size: int) -> None:
    host = inputs.host
    counts = np.array([row.count for row in rows])
    starts = np.array([row.start for row in rows])
    ends = np.cumsum(counts)
    tokens = int(ends[-1])
    of_row = np.repeat(np.arange(len(rows)), counts)
    positions = np.arange(tokens) + np.repeat(starts - (ends - counts), counts)
    ids: list[int] = []
    for row in rows:
        ids += row.session.tokens[row.start : row.end]
    host["ids"][:tokens] = ids
    host["positions"][:tokens] = positions
    host["slots"][:tokens] = table[of_row, positions // page_size].astype(np.int64) * page_size + positions % page_size
    host["starts"][0] = 0
    host["starts"][1 : len(rows) + 1] = ends
    host["lengths"][: len(rows)] = starts + counts


def told_positions(row: Row) -> range:
    """Of the row's positions, those at which logits are told, or what they say of the prompt's next token."""
    request = row.request
    if request.logits:
        return range(max(row.start, request.seen_from), row.end)
    if request.prompt_logprobs is not None:
        return range(max(row.start, request.seen_from), min(row.end, request.prompt_end - 1))
    return _NONE


def in_order(sampled: Sampled, sampling: Rows, wanted: Rows) -> Sampled:
    """`sampling`: the rows that its entries are of. → in the order of `wanted`, of those that sample."""
    entries = {row.request.id: entry for entry, row in enumerate(sampling)}
    order = [entries[row.request.id] for row in wanted if row.samples]
    unsound = set(sampled.unsound)
    return Sampled(
        [sampled.tokens[entry] for entry in order],
        [sampled.logprobs[entry] for entry in order],
        [index for index, entry in enumerate(order) if entry in unsound],
    )
