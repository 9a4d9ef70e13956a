"""Rows that go through a part of the blocks, in a step that runs others, too.

    blocks of the step     0 ──────── 3 ──────────── 7 ────── N
    a row [0, 7)           ━━━━━━━━━━━━━━━━━━━━━━━━━━┄┄┄┄┄┄┄┄┄    leaves before block 7: what it is there is held
    a row [3, N)           ┄┄┄┄┄┄┄┄┄┄━━━━━━━━━━━━━━━━━━━━━━━━━    joins before block 3: as what it was held there

All rows of a step run along through all blocks that the step runs, so shapes and graphs are those of any other step.
Outside of its own blocks (┄) a row leaves no trace, because its keys and values go to the scratch page: its slots
change on the device, between two blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from djinn_client.points import Point
from djinnd.core.batch import Row
from djinnd.device import Device
from djinnd.engine.held import HeldRows
from djinnd.engine.sending import send
from djinnd.engine.spans import spread
from djinnd.model.inputs import StepInputs
from djinnd.model.probe import Probe, look

_SCRATCH = 0  # a slot of the scratch page
_Moves = list[tuple[int, int, int, int]]  # of rows: block, first token, number of tokens, and first held row


def waits(row: Row, num_blocks: int) -> bool:
    """Whether the row leaves its step to wait at a boundary, be it the one behind the last block."""
    return row.stage is not None and row.stage.last <= num_blocks


def through(
    device: Device, inputs: StepInputs, held: HeldRows, rows: Sequence[Row], num_blocks: int, inner: Probe | None
) -> Probe | None:
    """The probe of a pass with these rows, for which `inputs` have been filled and not been sent: `inner`, where all of
    them go through all blocks."""
    gone, kept, come = _Moves(), _Moves(), _Moves()
    first = 0
    for row in rows:
        if row.stage is not None:
            joins = row.first_block > 0
            if joins:
                come.append((row.first_block, first, row.count, held.row_of(row)))
            if waits(row, num_blocks):
                gone.append((row.last_block, first, row.count, 0))
                if joins or (row.last_block > 0 and held.give_room(row)):
                    kept.append((row.last_block, first, row.count, held.row_of(row)))
        first += row.count
    return Passage(device, inputs, held, gone, kept, come, inner) if gone or come else inner


class Passage:
    """A Probe, of a pass in which such rows are. At each boundary `inner` comes after it: what is held is what was
    there before edits, and edits see rows that have joined."""

    def __init__(
        self,
        device: Device,
        inputs: StepInputs,
        held: HeldRows,
        gone: _Moves,
        kept: _Moves,
        come: _Moves,
        inner: Probe | None,
    ) -> None:
        """Takes the slots of rows that join from the host side of `inputs`."""
        self._come = _Spread(come)
        host = inputs.host["slots"]
        self._come_slots = host[self._come.tokens].astype(np.int64)
        host[self._come.tokens] = _SCRATCH
        self._moves = gone, kept
        self._device = device
        self._held = held.tensor
        self._slots = inputs.slots
        self._inner = inner
        blocks = [block for block, *_ in (*gone, *come)]
        self.first = min(blocks if inner is None else (*blocks, inner.first))
        self._own = frozenset(Point("resid", block) for block in blocks)

    @cached_property
    def points(self) -> frozenset[Point]:
        return self._own if self._inner is None else self._own | self._inner.points

    def at(self, point: Point, value: Tensor) -> None:
        """See Probe."""
        if point.where == "resid":
            self._pass(point.block, value[0])
        if self._inner is not None:
            look(self._inner, point, value)

    @cached_property
    def _gone(self) -> _Spread:
        return _Spread(self._moves[0])

    @cached_property
    def _kept(self) -> _Spread:
        return _Spread(self._moves[1])

    @cached_property
    def _there(self) -> Sequence[Tensor]:
        """All of it on the device: sent when the first row goes or comes, while that has the blocks before to do."""
        gone, kept, come = self._gone, self._kept, self._come
        arrays = [gone.tokens, kept.tokens, kept.held, come.tokens, come.held, self._come_slots]
        (there,) = send(self._device, [np.concatenate(arrays)])
        return torch.split(there, [len(array) for array in arrays])

    def _pass(self, block: int, rows: Tensor) -> None:
        kept, gone, come = (spread.at.get(block) for spread in (self._kept, self._gone, self._come))
        if gone is None and come is None:
            return
        gone_tokens, kept_tokens, kept_as, come_tokens, come_as, come_slots = self._there
        if kept is not None:
            self._held.index_copy_(0, kept_as[kept], rows.index_select(0, kept_tokens[kept]))
        if gone is not None:
            self._slots.index_fill_(0, gone_tokens[gone], _SCRATCH)
        if come is not None:
            rows.index_copy_(0, come_tokens[come], self._held.index_select(0, come_as[come]))
            self._slots.index_copy_(0, come_tokens[come], come_slots[come])


class _Spread:
    """Moves by token, in the order of blocks: the tokens, their held rows, and which of them each block has."""

    def __init__(self, moves: _Moves) -> None:
        self.tokens = self.held = np.empty(0, np.int64)
        self.at: dict[int, slice] = {}
        if not moves:
            return
        moves.sort()
        end = 0
        for block, _, count, _ in moves:
            self.at[block] = slice(self.at[block].start if block in self.at else end, end + count)
            end += count
        _, firsts, counts, rows = np.array(moves, np.int64).reshape(-1, 4).T
        self.tokens, of = spread(firsts, counts)
        self.held = self.tokens + (rows - firsts)[of]
