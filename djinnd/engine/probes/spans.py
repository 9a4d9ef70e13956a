"""A table of spans of positions that are edited or captured, and its join with the rows of a batch.

    spans    ┌ start ┬ end ┬ row ┬ stride ┬ sites ┬ … ┐      a key's spans are contiguous, in the owner's order
             │   4   │  6  │  0  │    1   │  0:2  │   │ ─┐
    sites    ┌ point ┬ shift ┐ ◄──────────────────────────┘  the points of a span
             │ r 3   │   0   │
             │ r 9   │   2   │
             └───────┴───────┘
A span covers positions [start, end) of its key's session, at each of its sites. Position p has the row
`row + stride * (p - start) + shift` in the tensor of the table's owner.

A join is a few numpy operations, for any number of sessions. A change rebuilds the arrays of all keys. Consecutive
spans in ascending order, such as the spans of one edit, are a run, which is searched by bisection. Spans at other
positions cost nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from djinn_client.protocol.fields.points import Point, Where
from djinnd.core.edits import FOREVER

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Records = npt.NDArray[np.void]

SPAN: list[tuple[str, type]] = [
    ("start", np.int64),
    ("end", np.int64),
    ("row", np.int64),
    ("stride", np.int64),
    ("site", np.int64),
    ("sites", np.int64),
]
SITE = np.dtype([("point", np.int64), ("shift", np.int64)])

_WHERES: tuple[Where, ...] = get_args(Where)
_KINDS = 8  # at least the number of kinds of points
_NOWHERE = 1 << 60  # a block number for points after the last block
_RUN = 2 * FOREVER  # greater than any position: adding run * _RUN makes the positions of all runs ascend
_NORM, _LOGITS = (_WHERES.index(where) for where in ("norm", "logits"))


def code_of(point: Point) -> int:
    return point.block * _KINDS + _WHERES.index(point.where)


def point_of(code: int) -> Point:
    return Point(_WHERES[code % _KINDS], code // _KINDS)


def is_behind(codes: Ints) -> Bools:
    """True for points of the epilogue, which sees only the tokens that get logits."""
    behind: Bools = (codes % _KINDS == _NORM) | (codes % _KINDS == _LOGITS)
    return behind


def sites_of(points: Iterable[Point], shifts: Sequence[int] = ()) -> Records:
    codes = [code_of(point) for point in points]
    sites = np.zeros(len(codes), SITE)
    sites["point"], sites["shift"] = codes, shifts or 0
    return sites


def kinds_of(points: Iterable[Point]) -> dict[bool, list[Point]]:
    """Groups points by whether their activations are as wide as the vocabulary (True) or the model (False)."""
    kinds: dict[bool, list[Point]] = {False: [], True: []}
    for point in points:
        kinds[point.where == "logits"].append(point)
    return {kind: some for kind, some in kinds.items() if some}


class PointReach(NamedTuple):
    """The extent of the points of some keys."""

    first: int  # lowest block of a point that is not after the last block
    is_behind: bool  # some point is after the last block


def reach_of(points: Iterable[Point]) -> PointReach:
    blocks = [_NOWHERE if point.is_behind else point.block for point in points]
    return PointReach(min(blocks), _NOWHERE in blocks)


def together(some: Sequence[PointReach]) -> PointReach | None:
    if len(some) == 1:
        return some[0]
    return PointReach(min(each.first for each in some), any(each.is_behind for each in some)) if some else None


class Hits(NamedTuple):
    """One hit for each position of a span and each of its points. `span`: index into the table's `spans`."""

    span: Ints
    point: Ints  # codes
    token: Ints  # index in the batch
    row: Ints

    def of(self, chosen: npt.NDArray[Any]) -> Hits:
        return Hits(*(each[chosen] for each in self))


class Overlaps:
    """Spans that overlap the rows of a batch, and their points. The hits are computed on demand. That takes the host as
    long as a block takes the device, which is busy with blocks by then."""

    def __init__(self, spans: Records, sites: Records, span: Ints, row: Ints, starts: Ints, counts: Ints) -> None:
        """`span` and `row`: pairs of a span and a row of the batch."""
        found = spans[span]
        low = np.maximum(found["start"], starts[row])
        high = np.minimum(found["end"], (starts + counts)[row])
        site, of = spread(found["site"], np.where(low < high, found["sites"], 0))
        self.points: Ints = sites["point"][site]  # codes: all points of each span that overlaps
        self.rows: Ints = row[of]  # row of the batch, for each of `points`
        self._given = found, sites, span, row, starts, counts, low, high

    @cached_property
    def hits(self) -> Hits:
        found, sites, span, row, starts, counts, low, high = self._given
        position, of = spread(low, high - low)
        site, hit = spread(found["site"][of], found["sites"][of])
        position, of, at = position[hit], of[hit], sites[site]
        first_token = np.cumsum(counts) - counts
        behind = position - found["start"][of]
        return Hits(
            span[of],
            at["point"],
            position - starts[row[of]] + first_token[row[of]],
            found["row"][of] + found["stride"][of] * behind + at["shift"],
        )


class SpanTable:
    """The spans of keys, as arrays that are rebuilt on the next use after a change."""

    def __init__(self, fields: Sequence[tuple[str, type]] = ()) -> None:
        """`fields`: further fields of the owner's spans, beside SPAN's."""
        self.dtype = np.dtype([*SPAN, *fields])
        self.version = 0  # counts changes
        # spans and sites; `site` of a span counts in these sites
        self._entries: dict[Hashable, tuple[Records, Records]] = {}
        self._reach: dict[Hashable, PointReach] = {}
        self._built: int  # the version of the arrays below
        self._place: dict[Hashable, int]
        self._first: Ints  # first run and number of runs, by place
        self._count: Ints
        self._run_ends: Ints  # end of each run in `spans`
        self._starts: Ints  # by span, plus run * _RUN
        self._ends: Ints
        self.spans: Records  # of all keys
        self._sites: Records
        self._build()

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._entries

    def set(self, key: Hashable, spans: Records, sites: Records) -> None:
        codes = sites["point"]
        behind = is_behind(codes)
        self._entries[key] = (spans, sites)
        self._reach[key] = PointReach(int((codes[~behind] // _KINDS).min(initial=_NOWHERE)), bool(behind.any()))
        self.version += 1

    def drop(self, key: Hashable) -> None:
        """Does nothing for a key that is not in the table."""
        self.version += self._entries.pop(key, None) is not None
        self._reach.pop(key, None)

    def reach(self, keys: Iterable[Hashable]) -> PointReach | None:
        """The reach of these keys' spans, at any position; None: they have none."""
        return together([self._reach[key] for key in self._reach.keys() & keys]) if self._reach else None

    def join(self, keys: Sequence[Hashable], starts: Ints, counts: Ints) -> Overlaps:
        """Finds the spans that overlap a batch, whose rows have positions [start, start + count) of their keys'
        sessions."""
        if not self._entries:
            return _NO_OVERLAPS
        run, row = self._runs_of(keys)
        first, end = self._next(run, starts[row]), np.searchsorted(self._starts, run * _RUN + (starts + counts)[row])
        span, of = spread(first, end - first)
        return Overlaps(self.spans, self._sites, span, row[of], starts, counts)

    def lasts(self, keys: Sequence[Hashable], starts: Ints) -> int:
        """The number of steps for which the hits stay the same, except for their positions. Each step adds one token to
        each key; the first has the positions `starts`."""
        run, row = self._runs_of(keys)
        span = self._next(run, starts[row])
        is_any = span < self._run_ends[run]
        row, found = row[is_any], self.spans[span[is_any]]
        edges = np.concatenate([found["start"] - starts[row], found["end"] - starts[row]])
        if np.any((found["start"] <= starts[row]) & (found["stride"] != 0)):
            return 1
        return int(min(edges[edges > 0], default=FOREVER))

    def _runs_of(self, keys: Sequence[Hashable]) -> tuple[Ints, Ints]:
        """The runs of these keys, and for each run the index of its key."""
        if self._built != self.version:
            self._build()
        place = np.array([self._place.get(key, -1) for key in keys])
        return spread(self._first[place], self._count[place])

    def _next(self, run: Ints, position: Ints) -> Ints:
        """For each run, its first span that ends after the position, or the end of the run."""
        return np.searchsorted(self._ends, run * _RUN + position, side="right")

    def _build(self) -> None:
        """The last place is for keys that are not in the table."""
        every = list(self._entries.values())
        self._place = {key: place for place, key in enumerate(self._entries)}
        self.spans = _joined([spans for spans, _ in every], self.dtype)
        self._sites = _joined([sites for _, sites in every], SITE)
        spans, sites = (np.array([len(each[kind]) for each in every], np.int64) for kind in (0, 1))
        self.spans["site"] += np.repeat(np.cumsum(sites) - sites, spans)

        starts, ends = self.spans["start"], self.spans["end"]
        place = np.repeat(np.arange(len(every)), spans)
        begins = np.ones(len(starts), np.bool_)
        begins[1:] = (starts[1:] < ends[:-1]) | (place[1:] != place[:-1])
        run = np.cumsum(begins) - 1
        self._starts, self._ends = starts + run * _RUN, ends + run * _RUN
        self._run_ends = np.append(np.flatnonzero(begins)[1:], len(starts))
        self._count = np.bincount(place[begins], minlength=len(every) + 1)
        self._first = np.cumsum(self._count) - self._count
        self._built = self.version


def _joined(arrays: Sequence[Records], dtype: np.dtype[np.void]) -> Records:
    """Concatenates into new memory. The usual case, one array, avoids numpy's slow promotion of record types."""
    return arrays[0].copy() if len(arrays) == 1 else np.concatenate([np.empty(0, dtype), *arrays])


def spread(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """The numbers first[i], first[i] + 1, … , count[i] of them for each i; and the i of each number."""
    of = np.repeat(np.arange(len(count)), count)
    behind = np.arange(len(of)) - (np.cumsum(count) - count)[of]
    return first[of] + behind, of


_NO_INTS = np.empty(0, np.int64)
_NO_OVERLAPS = Overlaps(np.empty(0, SPAN), np.empty(0, SITE), *[_NO_INTS] * 4)
