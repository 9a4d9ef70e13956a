"""The edits and captures of one model's sessions, and the hidden states of sessions that wait inside the model."""

from __future__ import annotations

import torch

from djinn_client.protocol.fields.points import PointMap
from djinnd.core.batch import Batch
from djinnd.core.edits import Edit
from djinnd.device import Device
from djinnd.engine.probes.captures import Captures
from djinnd.engine.probes.edit_table import EditTable
from djinnd.engine.probes.parked_states import ParkedStates
from djinnd.engine.probes.step_probe import Touched


class ModelProbes:
    """Owns these tables and their rows on the device."""

    def __init__(self, device: Device, model: str, points: PointMap, dtype: torch.dtype) -> None:
        self.edits = EditTable(device, model, points.width, points.vocab)
        self.captures = Captures(device, model, points.width, points.vocab, dtype)
        self.parked = ParkedStates(device, model, points.width, dtype)
        self._device = device
        self._touched: Touched | None = None  # the last batch that edits or captures may have touched

    def __bool__(self) -> bool:
        return bool(self.edits or self.captures or self.parked)

    @property
    def nbytes(self) -> int:
        """Bytes of the device's budget."""
        return self.edits.nbytes + self.captures.nbytes + self.parked.nbytes

    def use_edits(self, session: str, edits: tuple[Edit, ...]) -> None:
        """Sets the session's edits from the next step on. Raises OutOfMemory if their values have no room, and then the
        session has none."""
        if self.edits.of(session) != edits:
            self._touched = None  # the values that it refers to may move or go
            self.edits.set(session, edits)

    def touched(self, batch: Batch) -> Touched | None:
        """The rows and points that edits and captures touch in a step of this batch, the next one. None: they touch
        nothing."""
        if not self.edits and not self._captures_in(batch):
            return None
        touched, self._touched = self._touched, None
        if touched is None or not touched.lasts(batch):
            touched = Touched(self._device, batch, self.edits, self.captures)
        if not self.captures:  # captured rows move when others' captures come or go
            self._touched = touched
        return touched

    def _captures_in(self, batch: Batch) -> bool:
        """True if a request of the batch captures. Requests that have ended can still be in `captures`, while their
        rows are copied out."""
        return bool(self.captures) and any(row.request.id in self.captures for row in batch.rows)

    def release(self) -> None:
        self._touched = None
        self.edits.release()
        self.captures.release()
        self.parked.release()
