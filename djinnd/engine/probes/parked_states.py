"""Hidden states of rows that wait before a block, kept on the device for the step that continues them.

All positions of a session's stage (core/stops.py) are parked as they reached the boundary, before edits there. Edits
apply when the rows go on, as they do when everything is recomputed. A row that goes on and then waits before a later
block overwrites its parked state. Parked rows may be dropped at any time: the stage is then lost, and is recomputed.
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
from djinnd.engine.probes.device_rows import DeviceRows
from djinnd.engine.tuning import ROWS_AT_HAND


@dataclass(frozen=True, slots=True)
class _Parked:
    session: Session
    stage: Stage
    start: int  # positions [start, end)
    end: int
    row: int  # of the first position


class ParkedStates:
    """The parked rows of one model. A session is in here from the first step in which a row of its stage waits, as long
    as it keeps that stage."""

    def __init__(self, device: Device, model: str, width: int, dtype: torch.dtype) -> None:
        self._rows = DeviceRows(device, f"parked rows of {model}", width, dtype, ROWS_AT_HAND)
        self._parked: dict[str, _Parked] = {}  # by session

    def __len__(self) -> int:
        """The number of sessions."""
        return len(self._parked)

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
        parked = self._parked.get(session.id)
        return parked is not None and session.keeps(parked.stage)

    def give_room(self, row: Row) -> bool:
        """Reserves rows for the whole stage of a row that will wait. → False if there is no room, or was none when the
        stage began."""
        session, stage = row.session, row.stage
        assert stage is not None
        if row.start == session.computed and not self.holds(session):
            self.drop(session.id)
            start, end = row.start, len(session.tokens)
            with suppress(OutOfMemory):
                self._parked[session.id] = _Parked(session, stage, start, end, self._rows.take(end - start))
        return self.holds(session)

    def row_of(self, row: Row) -> int:
        """The parked row of the row's first position; the others follow."""
        parked = self._parked[row.session.id]
        assert parked.stage is row.stage and parked.start <= row.start and row.end <= parked.end, (parked, row.start)
        return parked.row + row.start - parked.start

    def drop(self, session: str) -> None:
        """Does nothing for a session that is not in here."""
        parked = self._parked.pop(session, None)
        if parked is not None:
            self._rows.give_back(parked.row, parked.end - parked.start)

    def sweep(self) -> None:
        """Drops the rows of sessions that have lost their stage."""
        for parked in [parked for parked in self._parked.values() if not parked.session.keeps(parked.stage)]:
            self.drop(parked.session.id)

    def release(self) -> None:
        """Frees the device memory; all parked rows are lost."""
        self._rows.release()
        self._parked.clear()

    def check_integrity(self) -> None:
        self._rows.check_integrity()
        rows = sorted((parked.row, parked.row + parked.end - parked.start) for parked in self._parked.values())
        assert all(end <= first for (_, end), (first, _) in pairwise(rows)), rows
