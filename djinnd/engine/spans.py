"""Which rows of a batch stand at positions that something is to be done to: a table of spans, joined with the batch.

    spans    ┌ start ┬ end ┬ row ┬ stride ┬ sites ┬ … ┐      a key's spans lie side by side, in the owner's order
             │   4   │  6  │  0  │    1   │  0:2  │   │ ─┐
    sites    ┌ point ┬ shift ┐ ◄──────────────────────────┘  the points of a span
             │ r 3   │   0   │
             │ r 9   │   2   │
             └───────┴───────┘
A span is about positions [start, end) of its key's session, at each of its sites. Position p has row
`row + stride * (p - start) + shift` of whatever the table's owner keeps in rows.

A join is a few numpy operations, whatever the number of sessions; a change rebuilds the arrays of all keys. Neighbours
that ascend, as those of one edit do, are a run, in which what a row hits is found by bisection: spans that are
elsewhere cost nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from djinn_client.points import Point, Where
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
_KINDS = 8  # more than there are
_NOWHERE = 1 << 60  # a block
_RUN = 2 * FOREVER  # more than any position: positions of all runs, one after another, ascend
_NORM, _LOGITS = (_WHERES.index(where) for where in ("norm", "logits"))


def code_of(point: Point) -> int:
    return point.block * _KINDS + _WHERES.index(point.where)


def point_of(code: int) -> Point:
    return Point(_WHERES[code % _KINDS], code // _KINDS)


def is_behind(codes: Ints) -> Bools:
    """Points of the epilogue, which sees the tokens whose logits are wanted and no others."""
    behind: Bools = (codes % _KINDS == _NORM) | (codes % _KINDS == _LOGITS)
    return behind


def sites_of(points: Iterable[Point], shifts: Sequence[int] = ()) -> Records:
    codes = [code_of(point) for point in points]
    sites = np.zeros(len(codes), SITE)
    sites["point"], sites["shift"] = codes, shifts or 0
    return sites


def kinds_of(points: Iterable[Point]) -> dict[bool, list[Point]]:
    """Points whose activations are as wide as the vocabulary, and the others, where there are such."""
    kinds: dict[bool, list[Point]] = {False: [], True: []}
    for point in points:
        kinds[point.where == "logits"].append(point)
    return {kind: some for kind, some in kinds.items() if some}


class Reach(NamedTuple):
    """Of all points that some keys have."""

    first: int  # the lowest block of those that are not behind all blocks
    is_behind: bool  # whether there are others


def reach_of(points: Iterable[Point]) -> Reach:
    blocks = [_NOWHERE if point.is_behind else point.block for point in points]
    return Reach(min(blocks), _NOWHERE in blocks)


def together(some: Sequence[Reach]) -> Reach | None:
    if len(some) == 1:
        return some[0]
    return Reach(min(each.first for each in some), any(each.is_behind for each in some)) if some else None


class Hits(NamedTuple):
    """One for each point at each position that a span is about. `span`: an index of the table's `spans`."""

    span: Ints
    point: Ints  # codes
    token: Ints  # index in the batch
    row: Ints

    def of(self, chosen: npt.NDArray[Any]) -> Hits:
        return Hits(*(each[chosen] for each in self))


class Overlaps:
    """Spans at positions of a batch's rows, and their points. What each position hits is worked out when it is asked
    for: that takes the host as long as a block takes the device, which may have blocks to do by then."""

    def __init__(self, spans: Records, sites: Records, span: Ints, row: Ints, starts: Ints, counts: Ints) -> None:
        """Of `spans` these, each with the row that it is at."""
        found = spans[span]
        low = np.maximum(found["start"], starts[row])
        high = np.minimum(found["end"], (starts + counts)[row])
        site, of = spread(found["site"], np.where(low < high, found["sites"], 0))
        self.points: Ints = sites["point"][site]  # codes: of each span all of its points
        self.rows: Ints = row[of]  # of the batch, one for each of those
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
    def __init__(self, fields: Sequence[tuple[str, type]] = ()) -> None:
        """`fields`: that the owner's spans have beside SPAN's."""
        self.dtype = np.dtype([*SPAN, *fields])
        self.version = 0  # of what is in it
        self._entries: dict[Hashable, tuple[Records, Records]] = {}  # spans, of which `site` counts in these sites
        self._reach: dict[Hashable, Reach] = {}
        self._built: int  # the version that the arrays are of
        self._place: dict[Hashable, int]
        self._first: Ints  # run, and how many, by place
        self._count: Ints
        self._run_ends: Ints  # spans, by run
        self._starts: Ints  # by span
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
        self._reach[key] = Reach(int((codes[~behind] // _KINDS).min(initial=_NOWHERE)), bool(behind.any()))
        self.version += 1

    def drop(self, key: Hashable) -> None:
        """One that is not there is none."""
        self.version += self._entries.pop(key, None) is not None
        self._reach.pop(key, None)

    def reach(self, keys: Iterable[Hashable]) -> Reach | None:
        """Wherever their spans are; None: they have none."""
        return together([self._reach[key] for key in self._reach.keys() & keys]) if self._reach else None

    def join(self, keys: Sequence[Hashable], starts: Ints, counts: Ints) -> Overlaps:
        """Of a batch of rows, each with positions [start, start + count) of the session of its key."""
        if not self._entries:
            return _NONE
        run, row = self._runs_of(keys)
        first, end = self._next(run, starts[row]), np.searchsorted(self._starts, run * _RUN + (starts + counts)[row])
        span, of = spread(first, end - first)
        return Overlaps(self.spans, self._sites, span, row[of], starts, counts)

    def lasts(self, keys: Sequence[Hashable], starts: Ints) -> int:
        """For so many steps in which each key has one token more, from one that it has at `starts` on, hits are the
        same, but for their positions."""
        run, row = self._runs_of(keys)
        span = self._next(run, starts[row])
        is_any = span < self._run_ends[run]
        row, found = row[is_any], self.spans[span[is_any]]
        edges = np.concatenate([found["start"] - starts[row], found["end"] - starts[row]])
        if np.any((found["start"] <= starts[row]) & (found["stride"] != 0)):
            return 1
        return int(min(edges[edges > 0], default=FOREVER))

    def _runs_of(self, keys: Sequence[Hashable]) -> tuple[Ints, Ints]:
        """The runs of these keys, and the index of the key that each is of."""
        if self._built != self.version:
            self._build()
        place = np.array([self._place.get(key, -1) for key in keys])
        return spread(self._first[place], self._count[place])

    def _next(self, run: Ints, position: Ints) -> Ints:
        """The first span of each run that ends behind the position; where there is none, the end of the run."""
        return np.searchsorted(self._ends, run * _RUN + position, side="right")

    def _build(self) -> None:
        """The last place is that of keys that the table does not have."""
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
    """Their own memory. Where there is one, as there mostly is, without what numpy does for records of two types."""
    return arrays[0].copy() if len(arrays) == 1 else np.concatenate([np.empty(0, dtype), *arrays])


def spread(first: Ints, count: Ints) -> tuple[Ints, Ints]:
    """The numbers first[i], first[i] + 1, … for each i, count[i] of them; and i of each."""
    of = np.repeat(np.arange(len(count)), count)
    behind = np.arange(len(of)) - (np.cumsum(count) - count)[of]
    return first[of] + behind, of


_NO_ONE = np.empty(0, np.int64)
_NONE = Overlaps(np.empty(0, SPAN), np.empty(0, SITE), *[_NO_ONE] * 4)
