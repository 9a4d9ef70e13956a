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

import numpy as np
from torch import Tensor

from djinn_client.points import Point
from djinnd.core.batch import Row
from djinnd.device import Device
from djinnd.engine.held import HeldRows
from djinnd.engine.sending import send
from djinnd.engine.spans import Ints, spread
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
        self._gone_at, gone_tokens, _ = _spread(gone)
        self._kept_at, kept_tokens, kept_as = _spread(kept)
        self._come_at, come_tokens, come_as = _spread(come)
        host = inputs.host["slots"]
        slots = host[come_tokens].astype(np.int64)
        host[come_tokens] = _SCRATCH
        arrays = [gone_tokens, kept_tokens, kept_as, come_tokens, come_as, slots]
        (there,) = send(device, [np.concatenate(arrays)])
        self._gone, self._kept, self._kept_as, self._come, self._come_as, self._come_slots = there.split(
            [len(array) for array in arrays]
        )
        self._held = held.tensor
        self._slots = inputs.slots
        self._inner = inner
        own = {Point("resid", block) for block in (*self._gone_at, *self._come_at)}
        self.points = frozenset(own if inner is None else own | inner.points)

    def at(self, point: Point, value: Tensor) -> None:
        """See Probe."""
        if point.where == "resid":
            self._pass(point.block, value[0])
        if self._inner is not None:
            look(self._inner, point, value)

    def _pass(self, block: int, rows: Tensor) -> None:
        if (some := self._kept_at.get(block)) is not None:
            self._held.index_copy_(0, self._kept_as[some], rows.index_select(0, self._kept[some]))
        if (some := self._gone_at.get(block)) is not None:
            self._slots.index_fill_(0, self._gone[some], _SCRATCH)
        if (some := self._come_at.get(block)) is not None:
            rows.index_copy_(0, self._come[some], self._held.index_select(0, self._come_as[some]))
            self._slots.index_copy_(0, self._come[some], self._come_slots[some])


def _spread(moves: _Moves) -> tuple[dict[int, slice], Ints, Ints]:
    """Their tokens and held rows, in the order of blocks, and which of them each block has."""
    moves.sort()
    at: dict[int, slice] = {}
    end = 0
    for block, _, count, _ in moves:
        at[block] = slice(at[block].start if block in at else end, end + count)
        end += count
    _, firsts, counts, rows = np.array(moves, np.int64).reshape(-1, 4).T
    tokens, of = spread(firsts, counts)
    return at, tokens, tokens + (rows - firsts)[of]
