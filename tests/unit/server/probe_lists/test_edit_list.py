from __future__ import annotations

import math

from djinn_client.protocol.fields.points import Point
from djinnd.core.edits import Edit, Extent
from djinnd.server.probe_lists.edit_list import PART_BYTES, EditList


def edit(number, *extents, values=b"", **fields):
    return Edit(number, (Point("resid", 3),), "add", extents, values=values, **fields)


def test_infos_describe_edits_as_the_client_made_them():
    edits = EditList()
    edits.add(edit(1, Extent(5), scale=2.5, values=b"1234", rows=1), ["blocks.3", "hook_embed"])
    edits.add(edit(2, Extent(1, 3), Extent(7, 8, 2), low=-1.0), ["model.layers.2"])
    one, two = edits.infos()
    assert (one.id, one.points, one.op, one.scale, one.nbytes) == (1, ["blocks.3", "hook_embed"], "add", 2.5, 4)
    assert (one.spans, one.low, one.high) == ([(5, None)], None, None)
    assert (two.spans, two.low, two.high) == ([(1, 3), (7, 8)], -1.0, None)
    assert edits.nbytes == 4 + (3 + 2 + 3) * PART_BYTES
    assert edits.unended == [1, 2]


def test_an_ended_edit_stays_as_long_as_the_session_has_positions_it_changed():
    edits = EditList()
    edits.add(edit(1, Extent(5)), ["a"])
    edits.add(edit(2, Extent(9)), ["b"])
    edits.end([1, 2], 9)
    assert edits.unended == []
    assert [(info.id, info.points, info.spans) for info in edits.infos()] == [(1, ["a"], [(5, 9)])]
    assert edits.names == {1: ["a"]} and edits.given == 2
    edits.cut(4)
    assert edits.infos() == [] and edits.names == {}
    edits.add(edit(3, Extent(3)), ["c"])
    assert edits.unended == [3]


def test_cut_reports_if_an_edit_has_changed():
    edits = EditList()
    assert not edits.cut(0)
    edits.add(edit(1, Extent(5)), ["a"])
    edits.add(edit(2, Extent(2, 4)), ["b"])
    assert not edits.cut(5)
    assert edits.cut(3)
    assert [info.spans for info in edits.infos()] == [[(3, None)], [(2, 4)]]
    edits.end([2], 3)
    assert not edits.cut(3)


def test_a_copy_is_independent_and_shares_the_values():
    values = bytes(1000)
    edits = EditList()
    edits.add(edit(1, Extent(5), values=values), ["a"])
    other = edits.copy()
    other.end([1], 5)
    other.add(edit(2, Extent(5)), ["b"])
    assert edits.unended == [1] and edits.given == 1 and edits.names == {1: ["a"]}
    assert other.unended == [2]
    assert edits.copy().edits[0].values is values


def test_a_missing_bound_is_reported_as_none():
    edits = EditList()
    edits.add(edit(1, Extent(0), low=-math.inf, high=2.0), ["a"])
    assert (edits.infos()[0].low, edits.infos()[0].high) == (None, 2.0)


def test_a_patch_replaces_earlier_ones_that_it_covers():
    def patch(number, *extents, points=(3,), op="replace"):
        return Edit(number, tuple(Point("resid", block) for block in points), op, extents)

    edits = EditList()
    for number, each in enumerate(
        (
            patch(1, Extent(4, 7)),
            patch(2, Extent(4, 8)),
            patch(3, Extent(5, 6), points=(3, 4)),
            patch(4, Extent(4, 7), op="add"),
            patch(5, Extent(5)),
            patch(6, Extent(4, 5), Extent(6, 7)),
        ),
        1,
    ):
        edits.add(each, [f"p{number}"])
    assert edits.replaced_by(patch(7, Extent(4, 7))) == [1, 6]
    assert edits.replaced_by(patch(7, Extent(0, 9), points=(2, 3, 4))) == [1, 2, 3, 6]
    assert edits.replaced_by(patch(7, Extent(0, 5), Extent(5, 9))) == [6], "none of its spans covers edit 1"
    assert edits.replaced_by(patch(7, Extent(4, 7), op="add")) == []
    assert [edit.number for edit in edits.without([1, 6]).edits] == [2, 3, 4, 5]
    assert edits.without([1]).nbytes == edits.nbytes - 3 * PART_BYTES
