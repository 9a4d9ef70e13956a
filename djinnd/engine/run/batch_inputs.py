"""Pure functions between the rows of a batch and the arrays of a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from djinnd.core.batch import Row
from djinnd.model.sampling.sampler import Sampled
from djinnd.model.step.inputs import StepInputs

Rows = Sequence[Row]

_NO_POSITIONS = range(0)


def compose(inputs: StepInputs, rows: Rows, table: npt.NDArray[np.int32], page_size: int) -> None:
    """Fills the host side of `inputs`, which may be larger. `table` [rows, pages]: the block tables of the rows'
    sessions. The n-th token that the step before samples has the id -1 - n, see StepInputs."""
    if all(row.count == 1 for row in rows):
        _compose_tokens(inputs, rows, table, page_size)
    else:
        _compose_chunks(inputs, rows, table, page_size)
    inputs.host["table"][: len(rows), : table.shape[1]] = table


def _compose_tokens(inputs: StepInputs, rows: Rows, table: npt.NDArray[np.int32], page_size: int) -> None:
    """`_compose_chunks` for rows of one token each, with half as many numpy calls: the device waits for them in every
    decode step."""
    host, count = inputs.host, len(rows)
    order, positions = np.arange(count + 1), np.array([row.start for row in rows])
    pages, offsets = np.divmod(positions, page_size)
    host["ids"][:count] = [row.session.tokens[row.start] if row.fed is None else -1 - row.fed for row in rows]
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
        ids += row.guess
    host["ids"][:tokens] = ids
    host["positions"][:tokens] = positions
    host["slots"][:tokens] = table[of_row, positions // page_size].astype(np.int64) * page_size + positions % page_size
    host["starts"][0] = 0
    host["starts"][1 : len(rows) + 1] = ends
    host["lengths"][: len(rows)] = starts + counts


def told_positions(row: Row) -> range:
    """The positions of the row where the request wants the logits, or the log probability of the prompt's next
    token."""
    request = row.request
    if request.logits:
        return range(max(row.start, request.seen_from), row.end)
    if request.prompt_logprobs is not None:
        return range(max(row.start, request.seen_from), min(row.end, request.prompt_end - 1))
    return _NO_POSITIONS


def in_order(sampled: Sampled, sampling: Rows, wanted: Rows) -> Sampled:
    """Reorders `sampled`, which has one entry for each row of `sampling`. → in the order of those rows of `wanted` that
    sample."""
    entries = {row.request.id: entry for entry, row in enumerate(sampling)}
    order = [entries[row.request.id] for row in wanted if row.samples]
    unsound, late, further = set(sampled.unsound), set(sampled.late), sampled.further
    return Sampled(
        [sampled.tokens[entry] for entry in order],
        [sampled.logprobs[entry] for entry in order],
        [index for index, entry in enumerate(order) if entry in unsound],
        [index for index, entry in enumerate(order) if entry in late],
        {index: further[entry] for index, entry in enumerate(order) if entry in further},
    )
