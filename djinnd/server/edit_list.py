"""The edits of a session as the server keeps them: what engines are told, and how clients have named the points."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from djinn_client.edits import EditInfo
from djinnd.core.edits import FOREVER, Edit, cut, ended

PART_BYTES = 128  # that each extent, point and name of an edit counts as, beside its values


@dataclass(slots=True)
class EditList:
    """`edits`: in the order of their numbers; those that are over, too, for as long as they have changed a position
    that is there. `names`: of the points of each, by its number, as they were asked for. `given`: the last number;
    none is given twice, also when its edit has gone."""

    edits: tuple[Edit, ...] = ()
    names: dict[int, Sequence[str]] = field(default_factory=dict)
    given: int = 0

    def add(self, edit: Edit, names: Sequence[str]) -> None:
        assert edit.number > self.given
        self.edits = (*self.edits, edit)
        self.names[edit.number] = names
        self.given = edit.number

    def end(self, numbers: Collection[int], at: int) -> None:
        """From position `at` on these change nothing."""
        self._keep(ended(self.edits, numbers, at))

    def cut(self, length: int) -> bool:
        """The session keeps so many tokens. Whether that has changed any edit."""
        was = self.edits
        self._keep(cut(was, length))
        return self.edits != was

    def replaced_by(self, edit: Edit) -> list[int]:
        """Numbers of those whose place it takes: patches at positions, at its points, that it has all of. So whoever
        patches the same again and again, as a client does that goes back to a hit, has one edit."""
        if edit.op != "replace":
            return []
        return [each.number for each in self.edits if each.op == "replace" and _has_all_of(edit, each)]

    def without(self, numbers: Collection[int]) -> EditList:
        edits = tuple(edit for edit in self.edits if edit.number not in numbers)
        return EditList(edits, self.names, self.given)

    def copy(self) -> EditList:
        """Of a fork: the values are the same memory."""
        return EditList(self.edits, dict(self.names), self.given)

    @property
    def unended(self) -> list[int]:
        """Numbers of those that are not over."""
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
    """Memory that it takes, as limits.edit_bytes_per_session counts."""
    return len(edit.values) + PART_BYTES * (len(edit.extents) + len(edit.points) + len(names))


def _has_all_of(edit: Edit, earlier: Edit) -> bool:
    """Of an edit that goes on for ever, nothing has: what it would do when the later one has ended is not known."""
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
