"""What one step does at points of the model: edits first, then captures, of all its rows together.

    edits, captures ──join──► hits, by token of the batch ──probe──► hits by the rows of what a pass sees ──► device
                                                                     (its tokens, or those whose logits are wanted)

Hits of one point are grouped so that no row is twice in a group: the groups follow each other in the order of the
edits' numbers. All indices of a probe come to the device in one copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import numpy as np
from torch import Tensor

from djinn_client.points import Point
from djinnd.core.batch import Batch
from djinnd.device import Device
from djinnd.engine.captures import Captures
from djinnd.engine.edit_table import EditTable
from djinnd.engine.sending import send
from djinnd.engine.spans import Hits, Ints, is_behind, point_of, spread
from djinnd.model.editing import EditRows, apply


class StepProbe:
    """A Probe (model/probe.py)."""

    def __init__(self, device: Device, edits: Hits, seen: Hits, table: EditTable, captures: Captures) -> None:
        """The hits' tokens are rows of what `at` is given."""
        self._edits: dict[Point, list[tuple[Tensor, EditRows]]] = {}
        self._seen: dict[Point, tuple[Tensor, Tensor, Tensor]] = {}  # from, to, and of which tensor
        edits, edit_groups = _grouped(edits)
        seen, seen_groups = _grouped(seen)
        does = table.spans[edits.span]
        fields = [np.ascontiguousarray(does[name]) for name in ("op", "scale", "low", "high")]
        sent = send(device, [edits.token, edits.row, seen.token, seen.row, *fields])
        where, value, source, target, op, scale, low, high = sent
        for point, group in edit_groups:
            bank = table.bank(of_logits=point.where == "logits")
            rows = EditRows(op[group], scale[group], low[group], high[group], value[group], bank)
            self._edits.setdefault(point, []).append((where[group], rows))
        for point, group in seen_groups:
            assert point not in self._seen, f"one position is captured twice at {point}"
            self._seen[point] = source[group], target[group], captures.into(of_logits=point.where == "logits")
        self.points = frozenset(self._edits.keys() | self._seen.keys())

    def at(self, point: Point, value: Tensor) -> None:
        """value: [1, rows, width], changed in place."""
        rows = value[0]
        for where, edits in self._edits.get(point, ()):
            apply(rows, where, edits)
        seen = self._seen.get(point)
        if seen is not None:
            source, target, into = seen
            into.index_copy_(0, target, rows.index_select(0, source))


class Touched:
    """What edits and captures have to do with the rows of one batch.

    Sessions that are steered while they decode are touched in the same way step after step: then this, with its probes,
    is of the next steps, too (`lasts`)."""

    def __init__(self, device: Device, batch: Batch, table: EditTable, captures: Captures) -> None:
        rows = batch.rows
        self._device = device
        self._table = table
        self._captures = captures
        self._version = table.version
        self._sessions = [row.session for row in rows]
        self._starts, self._counts = np.array([row.start for row in rows]), np.array([row.count for row in rows])
        self._probes: dict[tuple[bytes, bool], StepProbe | None] = {}
        names = [session.id for session in self._sessions]
        self._edits = table.join(names, self._starts, self._counts)
        self._seen = captures.join([row.request.id for row in rows], self._starts, self._counts)
        self._lasts = 1
        if batch.decode_only and not len(captures):
            self._lasts = table.lasts(names, self._starts)

    def lasts(self, batch: Batch) -> bool:
        """Whether this is as true of that batch."""
        if self._lasts == 1 or self._version != self._table.version or len(self._captures):
            return False
        if not batch.decode_only or [row.session for row in batch.rows] != self._sessions:
            return False
        steps = np.array([row.start for row in batch.rows]) - self._starts
        return bool(steps.min() >= 0 and steps.max() < self._lasts)

    @cached_property
    def behind(self) -> frozenset[int]:
        """The rows that are touched behind the blocks."""
        codes = np.concatenate([self._edits.point, self._seen.point])
        tokens = np.concatenate([self._edits.token, self._seen.token])[is_behind(codes)]
        return frozenset(np.searchsorted(np.cumsum(self._counts), tokens, side="right").tolist())

    def part(self, rows: Sequence[int]) -> Part:
        """A pass that brings these rows, in their order."""
        first = np.cumsum(self._counts) - self._counts
        index = np.array(rows)
        tokens, _ = spread(first[index], self._counts[index])
        return Part(self, tokens)

    def seen_behind(self, tokens: Ints) -> Ints:
        """Of these tokens, the indices of those whose norm or logits are captured."""
        indices: Ints = np.flatnonzero(np.isin(tokens, self._seen.token[is_behind(self._seen.point)]))
        return indices

    def probe(self, tokens: Ints, *, behind: bool) -> StepProbe | None:
        """Of a pass that brings these tokens, in their order; `behind`: of an epilogue that is given them. None: it has
        nothing to do there."""
        key = tokens.tobytes(), behind
        if key not in self._probes:
            place = np.full(self._counts.sum(), -1)
            place[tokens] = np.arange(len(tokens))
            edits, seen = (_placed(hits, place, behind) for hits in (self._edits, self._seen))
            has_any = len(edits.token) or len(seen.token)
            self._probes[key] = StepProbe(self._device, edits, seen, self._table, self._captures) if has_any else None
        return self._probes[key]


class Part:
    """The same of the rows of one pass. Tokens count in the pass."""

    def __init__(self, touched: Touched, tokens: Ints) -> None:
        self._touched = touched
        self._tokens = tokens

    def probe(self) -> StepProbe | None:
        """Of prologue and blocks."""
        return self._touched.probe(self._tokens, behind=False)

    def probe_behind(self, picks: Sequence[int]) -> StepProbe | None:
        """Of an epilogue that is given these tokens, none twice."""
        return self._touched.probe(self._tokens[list(picks)], behind=True)

    def seen_behind(self, others: Sequence[int]) -> list[int]:
        """Tokens whose norm or logits are captured, but for `others`."""
        tokens: list[int] = np.setdiff1d(self._touched.seen_behind(self._tokens), others).tolist()
        return tokens


def _placed(hits: Hits, place: Ints, behind: bool) -> Hits:
    hits = hits._replace(token=place[hits.token])
    return hits.of((hits.token >= 0) & (is_behind(hits.point) == behind))


def _grouped(hits: Hits) -> tuple[Hits, list[tuple[Point, slice]]]:
    """Spans of a session are in the order of the edits' numbers, and so are the groups of a point."""
    hits = hits.of(np.lexsort((hits.span, hits.token, hits.point)))
    index = np.arange(len(hits.token))
    again = np.zeros(len(index), np.bool_)
    again[1:] = (np.diff(hits.token) == 0) & (np.diff(hits.point) == 0)
    rank = index - np.maximum.accumulate(np.where(again, 0, index))
    order = np.lexsort((rank, hits.point))
    hits, rank = hits.of(order), rank[order]
    ends = np.flatnonzero(np.diff(rank) | np.diff(hits.point)) + 1
    edges = [0, *ends.tolist(), len(index)] if len(index) else [0]
    return hits, [(point_of(int(hits.point[first])), slice(first, end)) for first, end in pairwise(edges)]
