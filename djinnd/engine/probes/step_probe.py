"""The edits and captures of one step, for all its rows together. At each point edits come first, then captures.

    edits, captures ──join──► hits, by token of the batch ──probe──► hits, by row of the tensor at the point ──► device
                                                                     (the pass's tokens, or its logit_rows)

Hits of one point are grouped, so that no row is twice in a group. Groups apply in the order of the edits' numbers. All
indices of a probe are sent to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from djinn_client.protocol.fields.points import Point
from djinnd.core.batch import Batch
from djinnd.device import Device
from djinnd.engine.probes.captures import Captures
from djinnd.engine.probes.edit_table import EditTable
from djinnd.engine.probes.spans import Hits, Ints, Overlaps, is_behind, point_of, spread, together
from djinnd.model.copies.upload import upload_arrays
from djinnd.model.edit_rows import EditRows
from djinnd.model.whitebox.editing import apply
from djinnd.model.whitebox.probe import Probe


@dataclass(eq=False)
class StepProbe:
    """A Probe (model/whitebox/probe.py). It finds its hits when the step reaches the first block with a point. The
    device is busy with the blocks before then, so this delays nothing."""

    first: int  # no point is in a block before this one
    _device: Device
    _codes: Callable[[], Iterable[int]]  # the points
    # hits of edits and of captures, at these points; their tokens are rows of the tensor that `at` gets
    _hits: Callable[[], tuple[Hits, Hits]]
    _table: EditTable
    _captures: Captures

    @cached_property
    def points(self) -> frozenset[Point]:
        return frozenset(map(point_of, self._codes()))

    @cached_property
    def _work(self) -> tuple[dict[Point, list[tuple[Tensor, EditRows]]], dict[Point, tuple[Tensor, Tensor, Tensor]]]:
        """By point: edits as (rows, operations); captures as (rows to read, rows to write, tensor to write)."""
        edits, seen = self._hits()
        edits, edit_groups = _grouped(edits)
        seen, seen_groups = _grouped(seen)
        arrays: list[npt.NDArray[Any]] = [seen.token, seen.row]
        if edit_groups:
            does = self._table.span_table.spans[edits.span]
            arrays += [edits.token, edits.row]
            arrays += [np.ascontiguousarray(does[name]) for name in ("op", "scale", "low", "high")]
        source, target, *given = upload_arrays(self._device, arrays)
        edited: dict[Point, list[tuple[Tensor, EditRows]]] = {}
        captured: dict[Point, tuple[Tensor, Tensor, Tensor]] = {}
        for point, group in edit_groups:
            where, value, op, scale, low, high = (each[group] for each in given)
            bank = self._table.bank(of_logits=point.where == "logits")
            edited.setdefault(point, []).append((where, EditRows(op, scale, low, high, value, bank)))
        for point, group in seen_groups:
            assert point not in captured, f"one position is captured twice at {point}"
            captured[point] = source[group], target[group], self._captures.into(of_logits=point.where == "logits")
        return edited, captured

    def at(self, point: Point, value: Tensor) -> None:
        """value: [1, rows, width], changed in place."""
        edited, captured = self._work
        rows = value[0]
        for where, edits in edited.get(point, ()):
            apply(rows, where, edits)
        if (seen := captured.get(point)) is not None:
            source, target, into = seen
            into.index_copy_(0, target, rows.index_select(0, source))


class Touched:
    """The edits and captures that touch the rows of one batch.

    Sessions that are steered while they decode are touched in the same way step after step. Then this object, with its
    probes, serves the next steps too (`lasts`).
    """

    def __init__(self, device: Device, batch: Batch, table: EditTable, captures: Captures) -> None:
        self._rows = rows = batch.rows
        self._device = device
        self._table = table
        self._captures = captures
        self._version = table.span_table.version
        self._probes: dict[tuple[bytes, bool], StepProbe | None] = {}
        self._requests = [row.request.id for row in rows]
        edits, seen = table.span_table.reach(self._names) if table else None, captures.reaches(self._requests)
        self._reach = together([*seen.values()] if edits is None else [edits, *seen.values()])
        self._is_behind = self._reach is not None and self._reach.is_behind
        self._lasts = 1
        if not captures and batch.decode_only:
            self._lasts = table.span_table.lasts(self._names, self._starts)

    @cached_property
    def _names(self) -> list[str]:
        return [row.session.id for row in self._rows]

    @cached_property
    def _starts(self) -> Ints:
        return np.array([row.start for row in self._rows])

    @cached_property
    def _counts(self) -> Ints:
        return np.array([row.count for row in self._rows])

    @cached_property
    def _edits(self) -> Overlaps:
        return self._table.span_table.join(self._names, self._starts, self._counts)

    @cached_property
    def _seen(self) -> Overlaps:
        return self._captures.join(self._requests, self._starts, self._counts)

    def lasts(self, batch: Batch) -> bool:
        """True if this object is valid for that batch."""
        if self._lasts == 1 or self._version != self._table.span_table.version or len(self._captures):
            return False
        if not batch.decode_only or [row.session for row in batch.rows] != [row.session for row in self._rows]:
            return False
        steps = np.array([row.start for row in batch.rows]) - self._starts
        return bool(steps.min() >= 0 and steps.max() < self._lasts)

    @property
    def behind(self) -> frozenset[int]:
        """Rows with an edit or a capture after the last block."""
        return self._behind if self._is_behind else _NO_ROWS

    @cached_property
    def _behind(self) -> frozenset[int]:
        rows = [some.rows[is_behind(some.points)] for some in (self._edits, self._seen)]
        return frozenset(np.concatenate(rows).tolist())

    def part(self, rows: Sequence[int]) -> Part:
        """The part of a pass with these rows, in their order."""
        return Part(self, rows)

    def tokens(self, rows: Ints) -> Ints:
        first = np.cumsum(self._counts) - self._counts
        return spread(first[rows], self._counts[rows])[0]

    def seen_behind(self, tokens: Ints) -> Ints:
        """Indices of the tokens whose norm or logits are captured."""
        if not self._is_behind:
            return _NO_TOKENS
        hits = self._seen.hits
        indices: Ints = np.flatnonzero(np.isin(tokens, hits.token[is_behind(hits.point)]))
        return indices

    def probe(self, which: Sequence[int]) -> Probe | None:
        """The probe of prologue and blocks for a pass with these rows, in their order. None if the batch has no edits
        and no captures."""
        if self._reach is None:
            return None
        rows = np.array(which)
        key = rows.tobytes(), False
        if key not in self._probes:
            codes, tokens = partial(self._codes, rows), partial(self.tokens, rows)
            self._probes[key] = self._new_probe(self._reach.first, codes, tokens, False)
        return self._probes[key]

    def _codes(self, rows: Ints) -> set[int]:
        """Codes of the points, before the end of the last block, that touch these rows."""
        codes = np.concatenate([some.points for some in (self._edits, self._seen)])
        if len(rows) < len(self._counts):
            of_rows = np.concatenate([some.rows for some in (self._edits, self._seen)])
            codes = codes[np.isin(of_rows, rows)]
        return set(codes[~is_behind(codes)].tolist())

    def probe_behind(self, tokens: Ints) -> StepProbe | None:
        """The probe of an epilogue that gets these tokens, in their order. None if it has no hits."""
        if not self._is_behind:
            return None
        key = tokens.tobytes(), True
        if key not in self._probes:
            hits = [some.hits for some in (self._edits, self._seen)]
            codes = [some.point[is_behind(some.point) & np.isin(some.token, tokens)] for some in hits]
            found = set(np.concatenate(codes).tolist())
            self._probes[key] = self._new_probe(0, lambda: found, lambda: tokens, True) if found else None
        return self._probes[key]

    def _new_probe(
        self, first: int, codes: Callable[[], Iterable[int]], tokens: Callable[[], Ints], behind: bool
    ) -> StepProbe:
        def hits() -> tuple[Hits, Hits]:
            there = tokens()
            place = np.full(self._counts.sum(), -1)
            place[there] = np.arange(len(there))
            return _placed(self._edits.hits, place, behind), _placed(self._seen.hits, place, behind)

        return StepProbe(first, self._device, codes, hits, self._table, self._captures)


class Part:
    """The part of a Touched for the rows of one pass. Tokens are counted in the pass."""

    def __init__(self, touched: Touched, rows: Sequence[int]) -> None:
        self._touched = touched
        self._rows = rows

    @cached_property
    def _tokens(self) -> Ints:
        return self._touched.tokens(np.array(self._rows))

    def probe(self) -> Probe | None:
        """The probe of prologue and blocks."""
        return self._touched.probe(self._rows)

    def probe_behind(self, logit_rows: Sequence[int]) -> StepProbe | None:
        """The probe of an epilogue that gets these distinct tokens."""
        return self._touched.probe_behind(self._tokens[list(logit_rows)])

    def seen_behind(self, others: Sequence[int]) -> list[int]:
        """Tokens whose norm or logits are captured, without `others`."""
        tokens: list[int] = np.setdiff1d(self._touched.seen_behind(self._tokens), others).tolist()
        return tokens


_NO_TOKENS = np.empty(0, np.int64)
_NO_ROWS = frozenset[int]()


def _placed(hits: Hits, place: Ints, behind: bool) -> Hits:
    if not len(hits.token):
        return hits
    hits = hits._replace(token=place[hits.token])
    return hits.of((hits.token >= 0) & (is_behind(hits.point) == behind))


def _grouped(hits: Hits) -> tuple[Hits, list[tuple[Point, slice]]]:
    """Orders the hits by point and group. Spans of a session are in the order of the edits' numbers, and so are a
    point's groups."""
    if len(hits.token) < 2:  # the usual case, one session at a breakpoint, must be fast
        return hits, [(point_of(int(point)), slice(None)) for point in hits.point]
    hits = hits.of(np.lexsort((hits.span, hits.token, hits.point)))
    index = np.arange(len(hits.token))
    again = np.zeros(len(index), np.bool_)
    again[1:] = (np.diff(hits.token) == 0) & (np.diff(hits.point) == 0)
    rank = index - np.maximum.accumulate(np.where(again, 0, index))
    order = np.lexsort((rank, hits.point))
    hits, rank = hits.of(order), rank[order]
    ends = np.flatnonzero(np.diff(rank) | np.diff(hits.point)) + 1
    edges = [0, *ends.tolist(), len(index)]
    return hits, [(point_of(int(hits.point[first])), slice(first, end)) for first, end in pairwise(edges)]
