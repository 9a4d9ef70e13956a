"""Hidden states of rows that wait before a block, kept on the device for the step that continues them.

All positions of a session's stage (core/stops.py) are held as they reached the boundary, before edits there. Edits
apply when the rows go on, as they do when everything is recomputed. A row that goes on and then waits before a later
block overwrites its held state. Held rows may be dropped at any time: the stage is then lost, and is recomputed.
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
from djinnd.engine.memory.memory import ROWS_AT_HAND
from djinnd.engine.probes.device_rows import DeviceRows


@dataclass(frozen=True, slots=True)
class _Held:
    session: Session
    stage: Stage
    start: int  # positions [start, end)
    end: int
    row: int  # of the first position


class HeldRows:
    """The held rows of one model. A session is in here from the first step in which a row of its stage waits, as long
    as it keeps that stage."""

    def __init__(self, device: Device, model: str, width: int, dtype: torch.dtype) -> None:
        self._rows = DeviceRows(device, f"held rows of {model}", width, dtype, ROWS_AT_HAND)
        self._held: dict[str, _Held] = {}  # by session

    def __len__(self) -> int:
        """The number of sessions."""
        return len(self._held)

    @property
    def nbytes(self) -> int:
        """Bytes of the device's budget."""
        return self._rows.nbytes

    @property
    def tensor(self) -> Tensor:
        """[rows, width]. Replaced by a larger tensor when `give_room` grows it."""
        return self._rows.tensor

    def holds(self, session: Session) -> bool:
        """True if the session's stage has its rows here."""
        held = self._held.get(session.id)
        return held is not None and session.keeps(held.stage)

    def give_room(self, row: Row) -> bool:
        """Reserves rows for the whole stage of a row that will wait. → False if there is no room, or was none when the
        stage began."""
        session, stage = row.session, row.stage
        assert stage is not None
        if row.start == session.computed and not self.holds(session):
            self.drop(session.id)
            start, end = row.start, len(session.tokens)
            with suppress(OutOfMemory):
                self._held[session.id] = _Held(session, stage, start, end, self._rows.take(end - start))
        return self.holds(session)

    def row_of(self, row: Row) -> int:
        """The held row of the row's first position; the others follow."""
        held = self._held[row.session.id]
        assert held.stage is row.stage and held.start <= row.start and row.end <= held.end, (held, row.start)
        return held.row + row.start - held.start

    def drop(self, session: str) -> None:
        """Does nothing for a session that is not in here."""
        held = self._held.pop(session, None)
        if held is not None:
            self._rows.give_back(held.row, held.end - held.start)

    def sweep(self) -> None:
        """Drops the rows of sessions that have lost their stage."""
        for held in [held for held in self._held.values() if not held.session.keeps(held.stage)]:
            self.drop(held.session.id)

    def release(self) -> None:
        """Frees the device memory; all held rows are lost."""
        self._rows.release()
        self._held.clear()

    def check_integrity(self) -> None:
        self._rows.check_integrity()
        rows = sorted((held.row, held.row + held.end - held.start) for held in self._held.values())
        assert all(end <= first for (_, end), (first, _) in pairwise(rows)), rows
