"""The edits of one model's sessions, in the form that steps apply: positions, operations, and values.

Values are float32 on the device; edits are computed in float32. Sessions with equal edits, such as forks, share them.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from djinnd.core.edits import Edit
from djinnd.device import Device
from djinnd.engine.probes.device_rows import DeviceRows
from djinnd.engine.probes.spans import Records, SpanTable, kinds_of, sites_of
from djinnd.model.edit_rows import CODES
from djinnd.model.placing.loader import DTYPES

_FIELDS = [("op", np.int32), ("scale", np.float32), ("low", np.float32), ("high", np.float32)]
_DIRECTED = ("project_out", "clamp")  # operations that use only the direction of their values


class EditTable:
    """A session is in here from its first run with edits until its edits are dropped or it is closed. Its edits do not
    change while it runs."""

    def __init__(self, device: Device, model: str, width: int, vocab: int) -> None:
        self._device = device
        # its version counts every change, also of the banks: they grow and shrink with the table
        self.span_table = SpanTable(_FIELDS)
        self._values = {
            False: DeviceRows(device, f"edits of {model}", width, torch.float32),
            True: DeviceRows(device, f"edits of {model}'s logits", vocab, torch.float32),
        }
        # by edit and by whether its points are logits: [first row, number of users]
        self._held: dict[tuple[int, bool], list[int]] = {}
        self._edits: dict[str, tuple[Edit, ...]] = {}  # by session

    def __len__(self) -> int:
        """The number of sessions."""
        return len(self.span_table)

    @property
    def nbytes(self) -> int:
        """Bytes of the device's budget."""
        return sum(values.nbytes for values in self._values.values())

    def bank(self, *, of_logits: bool) -> Tensor:
        """float32 [rows, width or vocab]: `row` of a hit is a row of this tensor."""
        return self._values[of_logits].tensor

    def of(self, session: str) -> tuple[Edit, ...]:
        return self._edits.get(session, ())

    def set(self, session: str, edits: tuple[Edit, ...]) -> None:
        """Replaces the session's edits. Raises OutOfMemory with the figures; the session has no edits in here then."""
        before = self._edits.pop(session, ())
        held: list[Edit] = []
        try:
            for edit in edits:
                self._hold(edit)
                held.append(edit)
        except BaseException:
            self.span_table.drop(session)
            for edit in (*held, *before):
                self._let_go(edit)
            raise
        for edit in before:
            self._let_go(edit)
        if edits:
            self._edits[session] = edits
            self.span_table.set(session, *self._spans_of(edits))
        else:
            self.span_table.drop(session)

    def _spans_of(self, edits: tuple[Edit, ...]) -> tuple[Records, Records]:
        spans, sites, first_site = [], [], 0
        for edit in edits:
            stride = int(edit.rows > 1)
            bounds = np.array([(each.start, each.end, each.row) for each in edit.extents], np.int64)
            for of_logits, points in kinds_of(edit.points).items():
                bank_row = self._held[edit.mark, of_logits][0]
                part = np.zeros(len(bounds), self.span_table.dtype)
                part["start"], part["end"], part["row"] = bounds[:, 0], bounds[:, 1], bank_row + stride * bounds[:, 2]
                part["stride"], part["site"], part["sites"] = stride, first_site, len(points)
                part["op"], part["scale"], part["low"], part["high"] = CODES[edit.op], edit.scale, edit.low, edit.high
                spans.append(part)
                sites.append(sites_of(points))
                first_site += len(points)
        return np.concatenate(spans), np.concatenate(sites)

    # --- values -----------------------------------------------------------------------------------------------------

    def _hold(self, edit: Edit) -> None:
        """Counts one more user of the edit's values, and uploads them for the first. Raises OutOfMemory; nothing has
        changed then."""
        new: list[tuple[bool, int]] = []
        try:
            for of_logits in kinds_of(edit.points):
                if (edit.mark, of_logits) not in self._held:
                    new.append((of_logits, self._values[of_logits].take(max(edit.rows, 1))))
                    self._upload(edit, self._values[of_logits].tensor, new[-1][1])
        except BaseException:
            for of_logits, row in new:
                self._values[of_logits].give_back(row, max(edit.rows, 1))
            raise
        for of_logits, row in new:
            self._held[edit.mark, of_logits] = [row, 0]
        for of_logits in kinds_of(edit.points):
            self._held[edit.mark, of_logits][1] += 1

    def _upload(self, edit: Edit, bank: Tensor, row: int) -> None:
        """An edit without values gets a row of zeros, because every hit needs a row."""
        with self._device.computing(), torch.inference_mode():
            rows = bank[row : row + max(edit.rows, 1)]
            if edit.rows:
                values = torch.frombuffer(bytearray(edit.values), dtype=DTYPES[edit.dtype])
                rows.copy_(values.view(rows.shape))
                if edit.op in _DIRECTED:  # keeps the squares in the range of float32
                    rows /= rows.abs().amax(1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
            else:
                rows.zero_()

    def _let_go(self, edit: Edit) -> None:
        for of_logits in kinds_of(edit.points):
            held = self._held[edit.mark, of_logits]
            held[1] -= 1
            if not held[1]:
                del self._held[edit.mark, of_logits]
                self._values[of_logits].give_back(held[0], max(edit.rows, 1))

    def release(self) -> None:
        """Frees the device memory; all edits are lost."""
        for values in self._values.values():
            values.release()

    def check_integrity(self) -> None:
        users = [(edit.mark, kind) for edit in chain(*self._edits.values()) for kind in kinds_of(edit.points)]
        assert {key: users.count(key) for key in users} == {key: held[1] for key, held in self._held.items()}
        assert all(session in self.span_table for session in self._edits) and len(self) == len(self._edits)
        for values in self._values.values():
            values.check_integrity()
