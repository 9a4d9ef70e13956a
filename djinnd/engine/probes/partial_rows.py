"""Rows that run only some of the blocks, in a step that runs more.

    blocks of the step     0 ──────── 3 ──────────── 7 ────── N
    a row [0, 7)           ━━━━━━━━━━━━━━━━━━━━━━━━━━┄┄┄┄┄┄┄┄┄    leaves before block 7: its hidden state is parked
    a row [3, N)           ┄┄┄┄┄┄┄┄┄┄━━━━━━━━━━━━━━━━━━━━━━━━━    joins before block 3: with its parked hidden state

All rows of a step are in all blocks that the step runs, so shapes and graphs are the same as in other steps. Outside
its own blocks (┄) a row has no effect: its keys and values go to the scratch page. For that, its slots are changed on
the device between two blocks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from djinn_client.protocol.fields.points import Point
from djinnd.core.batch import Row
from djinnd.device import Device
from djinnd.engine.probes.parked_states import ParkedStates
from djinnd.engine.probes.spans import Ints, spread
from djinnd.model.copies.upload import upload_arrays
from djinnd.model.step.inputs import StepInputs
from djinnd.model.whitebox.probe import Probe, look

_SCRATCH = 0  # a slot of the scratch page
_Moves = list[tuple[int, int, int, int]]  # of each row: block, first token, number of tokens, first parked row
_Where = slice | Tensor  # rows of a tensor: a range, or indices


def waits(row: Row, num_blocks: int) -> bool:
    """True if the row leaves its step at a boundary and waits there. The end of the last block is such a boundary."""
    return row.stage is not None and row.stage.last <= num_blocks


def with_partial_rows(
    device: Device, inputs: StepInputs, parked: ParkedStates, rows: Sequence[Row], num_blocks: int, inner: Probe | None
) -> Probe | None:
    """The probe of a pass with these rows. `inputs` have been filled for the pass and not been sent. → `inner` if all
    rows run all blocks."""
    leaving, joining = list[tuple[Row, int]](), _Moves()
    first = 0
    for row in rows:
        if row.stage is not None:
            if row.first_block > 0:
                joining.append((row.first_block, first, row.count, parked.row_of(row)))
            if waits(row, num_blocks):
                leaving.append((row, first))
        first += row.count
    return PartialRows(device, inputs, parked, leaving, joining, inner) if leaving or joining else inner


class PartialRows:
    """The Probe of a pass with rows that leave or join. At each boundary `inner` comes second: parked states are from
    before edits, and edits apply to rows that have joined.

    It does as little as possible before the step is launched. Rows to park are reserved, and indices are sent, when the
    first row leaves or joins, while the device runs the blocks before. For a single row, nothing is sent.
    """

    def __init__(
        self,
        device: Device,
        inputs: StepInputs,
        parked: ParkedStates,
        leaving: Sequence[tuple[Row, int]],
        joining: _Moves,
        inner: Probe | None,
    ) -> None:
        """`leaving`: rows that leave, each with its first token in the pass. Redirects the slots of joining rows to the
        scratch page, on the host side of `inputs`."""
        self._joining = _MovesByBlock(joining)
        self._joining_slots = np.empty(0, np.int64)
        if joining:
            host = inputs.host["slots"]
            self._joining_slots = host[self._joining.tokens].astype(np.int64)
            host[self._joining.tokens] = _SCRATCH
        self._rows = leaving
        self._device = device
        self._parked = parked
        self._slots = inputs.slots
        self._inner = inner
        blocks = [*(row.last_block for row, _ in leaving), *(block for block, *_ in joining)]
        self.first = min(blocks if inner is None else (*blocks, inner.first))
        self._own = frozenset(Point("resid", block) for block in blocks)

    @cached_property
    def points(self) -> frozenset[Point]:
        return self._own if self._inner is None else self._own | self._inner.points

    def at(self, point: Point, value: Tensor) -> None:
        """Parks the rows that leave before the point's block, and puts back the rows that join there."""
        if point in self._own:
            self._at_boundary(point.block, value[0])
        if self._inner is not None:
            look(self._inner, point, value)

    @cached_property
    def _on_device(self) -> tuple[_Places, _Places, _Places, Tensor]:
        """Places of rows that leave, of leaving rows that are parked, and of rows that join, by block; and the slots of
        joining rows."""
        parked = self._parked
        leaving = _MovesByBlock([(row.last_block, first, row.count, 0) for row, first in self._rows])
        kept = _MovesByBlock(
            [
                (row.last_block, first, row.count, parked.row_of(row))
                for row, first in self._rows
                if row.first_block > 0 or (row.last_block > 0 and parked.give_room(row))
            ]
        )
        spreads = leaving, kept, self._joining
        arrays = [*(array for each in spreads for array in each.to_send), self._joining_slots]
        there = iter(_send_together(self._device, arrays))
        places = [each.places([next(there) for _ in each.to_send]) for each in spreads]
        return places[0], places[1], places[2], next(there)

    def _at_boundary(self, block: int, rows: Tensor) -> None:
        leaving, kept, joining, slots = self._on_device
        if block in kept:
            tokens, parked_as, _ = kept[block]
            _scatter(self._parked.tensor, parked_as, _gather(rows, tokens))
        if block in leaving:
            tokens, _, _ = leaving[block]
            _fill_rows(self._slots, tokens, _SCRATCH)
        if block in joining:
            tokens, parked_as, which = joining[block]
            _scatter(rows, tokens, _gather(self._parked.tensor, parked_as))
            _scatter(self._slots, tokens, slots[which])


_Places = Mapping[
    int, tuple[_Where, _Where, slice]
]  # by block: tokens, parked rows, and the block's part of all tokens


class _MovesByBlock:
    """Moves by token, in the order of blocks."""

    def __init__(self, moves: _Moves) -> None:
        self.tokens: Ints
        self._parked: Ints
        self._at: dict[int, slice] = {}  # by block: its part of the tokens
        self._single: _Places | None = None
        moves.sort()
        if not moves:
            self._single = {}
        elif len(moves) == 1:
            (block, first, count, row) = moves[0]
            self.tokens = np.arange(first, first + count)
            self._single = {block: (slice(first, first + count), slice(row, row + count), slice(None))}
        else:
            end = 0
            for block, _, count, _ in moves:
                self._at[block] = slice(self._at[block].start if block in self._at else end, end + count)
                end += count
            _, firsts, counts, rows = np.array(moves, np.int64).reshape(-1, 4).T
            self.tokens, of = spread(firsts, counts)
            self._parked = self.tokens + (rows - firsts)[of]

    @property
    def to_send(self) -> list[Ints]:
        return [] if self._single is not None else [self.tokens, self._parked]

    def places(self, sent: Sequence[Tensor]) -> _Places:
        """`sent`: the arrays of `to_send`, on the device."""
        if self._single is not None:
            return self._single
        tokens, parked = sent
        return {block: (tokens[which], parked[which], which) for block, which in self._at.items()}


def _send_together(device: Device, arrays: Sequence[Ints]) -> Sequence[Tensor]:
    """Sends the arrays in one copy, if there is anything to send."""
    sizes = [len(array) for array in arrays]
    if not any(sizes):
        return [torch.empty(0, dtype=torch.int64)] * len(arrays)
    (there,) = upload_arrays(device, [np.concatenate(arrays)])
    return torch.split(there, sizes)


def _gather(rows: Tensor, where: _Where) -> Tensor:
    return rows[where] if isinstance(where, slice) else rows.index_select(0, where)


def _scatter(into: Tensor, where: _Where, rows: Tensor) -> None:
    if isinstance(where, slice):
        into[where].copy_(rows)
    else:
        into.index_copy_(0, where, rows)


def _fill_rows(into: Tensor, where: _Where, value: int) -> None:
    if isinstance(where, slice):
        into[where].fill_(value)
    else:
        into.index_fill_(0, where, value)
