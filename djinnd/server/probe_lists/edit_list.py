"""The edits of a session as the server stores them: the edits for engines, and the names that clients gave the
points."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from djinn_client.protocol.fields.edits import EditInfo
from djinnd.core.edits import FOREVER, Edit, cut, ended

PART_BYTES = 128  # counted for each extent, point and name of an edit, beside its values


@dataclass(slots=True)
class EditList:
    """All edits of a session.

    - `edits`: in the order of their numbers. Ended ones stay as long as the session has positions that they changed.
    - `names`: for each edit's number, the names of its points as the client gave them.
    - `given`: the last number given. A number is never reused, also if its edit is gone.
    """

    edits: tuple[Edit, ...] = ()
    names: dict[int, Sequence[str]] = field(default_factory=dict)
    given: int = 0

    def add(self, edit: Edit, names: Sequence[str]) -> None:
        assert edit.number > self.given
        self.edits = (*self.edits, edit)
        self.names[edit.number] = names
        self.given = edit.number

    def end(self, numbers: Collection[int], at: int) -> None:
        """Ends these edits: from position `at` on they change nothing."""
        self._keep(ended(self.edits, numbers, at))

    def cut(self, length: int) -> bool:
        """Adapts the edits to a session that was cut to `length` tokens. Returns True if any edit has changed."""
        was = self.edits
        self._keep(cut(was, length))
        return self.edits != was

    def replaced_by(self, edit: Edit) -> list[int]:
        """Numbers of the edits that this one replaces: patches at some of its points and positions, and at no others.
        So a client that goes back to a hit and patches the same place again and again has one edit."""
        if edit.op != "replace":
            return []
        return [each.number for each in self.edits if each.op == "replace" and _has_all_of(edit, each)]

    def without(self, numbers: Collection[int]) -> EditList:
        edits = tuple(edit for edit in self.edits if edit.number not in numbers)
        return EditList(edits, self.names, self.given)

    def copy(self) -> EditList:
        """The edits for a fork. The values share memory with this session's."""
        return EditList(self.edits, dict(self.names), self.given)

    @property
    def unended(self) -> list[int]:
        """Numbers of the edits that have not ended."""
        return [edit.number for edit in self.edits if not edit.over]

    @property
    def nbytes(self) -> int:
        return sum(nbytes_of(edit, self.names[edit.number]) for edit in self.edits)

    def infos(self) -> list[EditInfo]:
        return [_info(edit, self.names[edit.number]) for edit in self.edits]

    def _keep(self, edits: tuple[Edit, ...]) -> None:
        self.edits = edits
        self.names = {edit.number: self.names[edit.number] for edit in edits}


def nbytes_of(edit: Edit, names: Sequence[str]) -> int:
    """Memory of an edit, as limits.edit_bytes_per_session counts it."""
    return len(edit.values) + PART_BYTES * (len(edit.extents) + len(edit.points) + len(names))


def _has_all_of(edit: Edit, earlier: Edit) -> bool:
    """True if the later edit covers all points and positions of the earlier one. An edit without an end is never
    covered, because it would apply again after the later one has ended."""
    return set(earlier.points) <= set(edit.points) and all(
        part.end != FOREVER and any(each.start <= part.start and part.end <= each.end for each in edit.extents)
        for part in earlier.extents
    )


def _info(edit: Edit, names: Sequence[str]) -> EditInfo:
    return EditInfo(
        id=edit.number,
        points=list(names),
        op=edit.op,
        scale=edit.scale,
        low=None if edit.low == -math.inf else edit.low,
        high=None if edit.high == math.inf else edit.high,
        spans=[(each.start, None if each.end == FOREVER else each.end) for each in edit.extents],
        nbytes=len(edit.values),
    )
