"""Hidden states of rows that wait before a block: what they go on from, on the device.

Held are all positions of a session's stage (core/stops.py), as they came to the boundary, before any edit there: edits
apply when the rows go on, as they do where everything is computed anew. A row that goes on and waits before a later
block then is written over what it was held as. Nothing hangs on what is held: without it, a stage is lost.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from djinn_client.errors import OutOfMemory
from djinnd.core.batch import Row
from djinnd.core.session import Session
from djinnd.core.stops import Stage
from djinnd.device import Device
from djinnd.engine.device_rows import DeviceRows
from djinnd.engine.memory import ROWS_AT_HAND


@dataclass(frozen=True, slots=True)
class _Held:
    session: Session
    stage: Stage
    start: int  # positions [start, end)
    end: int
    row: int  # of the first


class HeldRows:
    """Of one model. A session is here from the first step in which a row of its stage waits, as long as it keeps
    that stage."""

    def __init__(self, device: Device, model: str, width: int, dtype: torch.dtype) -> None:
        self._rows = DeviceRows(device, f"held rows of {model}", width, dtype, ROWS_AT_HAND)
        self._held: dict[str, _Held] = {}  # by session

    def __len__(self) -> int:
        """Sessions."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Of the device's budget."""
        return self._rows.nbytes

    @property
    def tensor(self) -> Tensor:
        """[rows, width]: another one when somebody has been given room."""
        return self._rows.tensor

    def holds(self, session: Session) -> bool:
        """What it is to go on from, once it has its stage."""
        held = self._held.get(session.id)
        return held is not None and session.keeps(held.stage)

    def give_room(self, row: Row) -> bool:
        """For a row that will wait, with all others of its stage. False: there is none, now or when the stage began."""
        session, stage = row.session, row.stage
        assert stage is not None
        if row.start == session.computed and not self.holds(session):
            self.drop(session.id)
            start, end = row.start, len(session.tokens)
            with suppress(OutOfMemory):
                self._held[session.id] = _Held(session, stage, start, end, self._rows.take(end - start))
        return self.holds(session)

    def row_of(self, row: Row) -> int:
        """The first of those that the row's positions have."""
        held = self._held[row.session.id]
        assert held.stage is row.stage and held.start <= row.start and row.end <= held.end, (held, row.start)
        return held.row + row.start - held.start

    def drop(self, session: str) -> None:
        """One that is not here has nothing."""
        held = self._held.pop(session, None)
        if held is not None:
            self._rows.give_back(held.row, held.end - held.start)

    def sweep(self) -> None:
        """Whose stage is gone goes."""
        for held in [held for held in self._held.values() if not held.session.keeps(held.stage)]:
            self.drop(held.session.id)

    def release(self) -> None:
        """The device's memory, and with it all that is held."""
        self._rows.release()
        self._held.clear()

    def check_integrity(self) -> None:
        self._rows.check_integrity()
        rows = sorted((held.row, held.row + held.end - held.start) for held in self._held.values())
        assert all(end <= first for (_, end), (first, _) in pairwise(rows)), rows
