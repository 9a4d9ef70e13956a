from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from djinn_client.protocol.fields.points import Point
from djinnd.engine.probes.spans import SpanTable, code_of, is_behind, point_of, sites_of, spread

POINTS = [Point("resid", 0), Point("resid", 4), Point("attn", 3), Point("mlp", 0), Point("norm"), Point("logits")]


def test_each_point_has_its_own_code() -> None:
    assert [point_of(code_of(point)) for point in POINTS] == POINTS
    codes = np.array([code_of(point) for point in POINTS])
    assert is_behind(codes).tolist() == [False, False, False, False, True, True]


def test_ranges_are_concatenated() -> None:
    values, of = spread(np.array([5, 9, 0]), np.array([2, 0, 3]))
    assert values.tolist() == [5, 6, 0, 1, 2] and of.tolist() == [0, 0, 2, 2, 2]


Span = tuple[int, int, int, int, list[int]]  # start, length, row, stride, points
SPANS = st.lists(
    st.tuples(
        st.integers(0, 12), st.integers(0, 6), st.integers(0, 50), st.integers(0, 1), st.lists(st.integers(0, 5))
    ),
    max_size=3,
)


def put(table: SpanTable, key: int, spans: list[Span]) -> None:
    sites = [sites_of([POINTS[p] for p in points], [100 * p for p in points]) for *_, points in spans]
    firsts = np.cumsum([0, *map(len, sites)])
    records = [
        (start, start + length, row, stride, firsts[index], len(points))
        for index, (start, length, row, stride, points) in enumerate(spans)
    ]
    table.set(key, np.array(records, table.dtype), np.concatenate([sites_of([]), *sites]))


@given(
    st.dictionaries(st.integers(0, 4), SPANS),
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 10), st.integers(1, 5)), min_size=1, max_size=4),
    st.sets(st.integers(0, 4)),
)
def test_hits_equal_those_of_a_search_one_by_one(
    entries: dict[int, list[Span]], rows: list[tuple[int, int, int]], dropped: set[int]
) -> None:
    table = SpanTable()
    for key, spans in entries.items():
        put(table, key, spans)
    for key in dropped:
        table.drop(key)
        entries.pop(key, None)
    assert len(table) == len(entries)
    starts, counts = np.array([start for _, start, _ in rows]), np.array([count for *_, count in rows])
    hits = table.join([key for key, *_ in rows], starts, counts).hits
    expected, token = [], 0
    for key, first, count in rows:
        for position in range(first, first + count):
            for start, length, row, stride, points in entries.get(key, []):
                if start <= position < start + length:
                    place = row + stride * (position - start)
                    expected += [(code_of(POINTS[p]), token, place + 100 * p) for p in points]
            token += 1
    found = list(zip(hits.point.tolist(), hits.token.tolist(), hits.row.tolist(), strict=True))
    assert sorted(found) == sorted(expected)
    if len(found):
        assert (table.spans[hits.span]["start"] >= 0).all()
