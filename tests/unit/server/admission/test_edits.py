from __future__ import annotations

import math
from array import array

import pytest

from djinn_client.errors import InvalidRequest, QuotaExceeded
from djinn_client.protocol import AddEdit, ModelInfo
from djinn_client.protocol.fields.points import Point, PointMap
from djinnd.config import Limits
from djinnd.core.edits import Extent
from djinnd.server.admission import admission
from djinnd.server.admission import edits as edit_admission
from djinnd.server.probe_lists.edit_list import EditList

POINTS = PointMap(blocks=4, width=8, vocab=100, attention="self_attn", mlp="mlp", norm="model.norm", head="lm_head")
MODEL = ModelInfo(name="m", path="/m", vocab=100, max_context=50, points=POINTS, dtype="float32")


def floats(*values):
    return array("f", values).tobytes()


VECTOR = floats(1, 2, 3, 4, 5, 6, 7, 8)


def request(**fields):
    given = {"points": ["blocks.1"], "values": VECTOR, "rows": 1} | fields
    return AddEdit(id=1, session="s", **given)


def edit(tokens=10, fixed=0, edits=None, **fields):
    asked = request(**fields)
    edit_admission.check_form(asked)
    return edit_admission.edit_of(asked, edits or EditList(), tokens, fixed, MODEL)


def test_an_edit_without_positions_begins_where_the_next_token_is_chosen():
    made = edit(scale=4.0)
    assert (made.number, made.points, made.op, made.scale) == (1, (Point("resid", 2),), "add", 4.0)
    assert (made.extents, made.rows, made.values) == ((Extent(9),), 1, VECTOR)
    assert (made.low, made.high) == (-math.inf, math.inf)
    assert edit(tokens=0).extents == (Extent(0),)


def test_positions_become_spans_with_one_row_or_a_row_each():
    positions = [0, 1, 2, 7, 9, 10]
    assert edit(positions=positions).extents == (Extent(0, 3), Extent(7, 8), Extent(9, 11))
    each = edit(positions=positions, rows=6, values=VECTOR * 6)
    assert each.extents == (Extent(0, 3, 0), Extent(7, 8, 3), Extent(9, 11, 4))
    assert edit(positions=[49]).extents == (Extent(49, 50),)


def test_a_point_that_is_named_twice_is_edited_once():
    assert edit(points=["blocks.1", "blocks.2.hook_resid_pre", "blocks.0"]).points == (
        Point("resid", 2),
        Point("resid", 1),
    )
    assert len(edit(points=["blocks.*.hook_resid_pre"]).points) == 4


@pytest.mark.parametrize(
    "fields",
    [
        {"op": "scale", "scale": 0.5, "values": b"", "rows": 0},
        {"op": "clamp", "low": -1.0},
        {"op": "clamp", "high": 1.0},
        {"op": "clamp", "low": 1.0, "high": 1.0},
        {"op": "project_out", "scale": -2.0},
        {"op": "replace", "positions": [3, 4], "rows": 2, "values": VECTOR * 2},
        {"points": ["logits"], "values": floats(*range(100))},
        {"dtype": "bfloat16", "values": bytes(16)},
        {"values": bytes(32)},
    ],
)
def test_valid_edits_pass(fields):
    assert edit(**fields).op == fields.get("op", "add")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"points": []}, "name the points"),
        ({"points": ["blocks.4"]}, "no point 'blocks.4'"),
        ({"points": ["blocks.1.hook_resid_prod"]}, r"did you mean blocks\.1\.hook_resid_pre"),
        ({"points": ["x" * 257]}, "257 characters"),
        ({"points": [f"blocks.{n}" for n in range(1025)]}, "1,025 points are too many: at most 1,024"),
        ({"points": ["blocks.1", "logits"]}, "the points are 8 and 100 wide"),
        ({"scale": math.nan}, "scale is nan"),
        ({"scale": -math.inf}, "scale is -inf"),
        ({"scale": 1e39}, r"scale is 1e\+39; it must be a finite number of float32"),
        ({"op": "replace", "scale": 2.0}, "replace has none: add, scale, project_out do"),
        ({"op": "clamp", "low": 0.0, "scale": 2.0}, "clamp has none"),
        ({"low": 1.0}, "low is 1, and add has none: clamp does"),
        ({"op": "scale", "high": 1.0, "values": b"", "rows": 0}, "high is 1, and scale has none"),
        ({"op": "clamp"}, "clamp needs low, high or both"),
        ({"op": "clamp", "low": 2.0, "high": 1.0}, "low is 2 and high 1"),
        ({"op": "clamp", "low": math.nan}, "low is nan"),
        ({"op": "clamp", "high": math.inf}, "high is inf"),
        ({"op": "scale"}, "scale has no values: rows must be 0"),
        ({"rows": 0, "values": b""}, "add has 0 rows of values; it must be 1$"),
        ({"rows": 2, "values": VECTOR * 2}, "add has 2 rows of values; it must be 1$"),
        ({"rows": 2, "values": VECTOR * 2, "positions": [1, 2, 3]}, "2 rows of values; it must be 1, or 3, one for"),
        ({"rows": -1}, "-1 rows"),
        ({"values": VECTOR[:-1]}, r"the values are 31 bytes, and blocks\.1 is 8 wide: give \[1, 8\] in float32"),
        ({"values": VECTOR, "dtype": "bfloat16"}, r"the values are \[1, 16\], .* give \[1, 8\] in bfloat16"),
        ({"values": floats(0, 0, 0, math.nan, 0, math.inf, 0, 0)}, "a NaN or an infinity at index 3"),
        ({"op": "project_out", "values": bytes(32)}, "row 0 of the values is zero, or nearly: project_out needs"),
        ({"op": "clamp", "low": 0.0, "positions": [1, 2], "rows": 2, "values": VECTOR + bytes(32)}, "row 1 of the"),
        ({"positions": []}, "positions is empty"),
        ({"positions": [-1, 3]}, "position -1 is negative"),
        ({"positions": [3, 3]}, "position 3 comes after 3: positions ascend"),
        ({"positions": [1, 50]}, "position 50 never comes: m has 0 to 49"),
        ({"positions": [0] * 51}, "never comes"),
        ({"positions": [1 << 70]}, "never comes"),
    ],
)
def test_invalid_edits_are_refused(fields, words):
    with pytest.raises(InvalidRequest, match=words):
        edit(**fields)


def test_positions_with_a_client_s_kv_cannot_be_edited():
    assert edit(fixed=9).extents == (Extent(9),)
    assert edit(fixed=9, positions=[9, 20]).extents == (Extent(9, 10), Extent(20, 21))
    with pytest.raises(InvalidRequest, match=r"came from a client .* position 8 cannot be edited, .* from 9 on can"):
        edit(fixed=9, positions=[8, 9])


def filled(*made):
    edits = EditList()
    for each in made:
        edits.add(each, ["blocks.1"])
    return edits


def test_limits_of_a_session_s_edits():
    edits = filled(edit())
    second = edit(edits=edits)
    assert second.number == 2
    names = ["blocks.1"]
    size = 32 + 3 * 128
    edit_admission.check_room(second, names, edits, Limits(edits_per_session=2, edit_bytes_per_session=2 * size))
    with pytest.raises(QuotaExceeded, match=r"1 edits, and limits\.edits_per_session is 1") as refused:
        edit_admission.check_room(second, names, edits, Limits(edits_per_session=1))
    assert refused.value.data == {"quota": "edits_per_session", "limit": 1, "used": 1}
    with pytest.raises(QuotaExceeded, match=r"takes 416 bytes and the session's others 416; .* is 831") as refused:
        edit_admission.check_room(second, names, edits, Limits(edit_bytes_per_session=831))
    assert (refused.value.data["used"], refused.value.data["needed"]) == (416, 416)


def test_limit_of_edits_at_a_position():
    """Edits of one point that may overlap count, and no others."""
    edits, limits = EditList(), Limits(edits_per_position=2)

    def add(**fields):
        made = edit(edits=edits, **fields)
        edit_admission.check_room(made, ["blocks.1"], edits, limits)
        edits.add(made, ["blocks.1"])

    add()
    add(positions=[20, 40])
    with pytest.raises(QuotaExceeded, match=r"2 edits at one point .* limits\.edits_per_position is 2") as refused:
        add(positions=[30])
    assert refused.value.data == {"quota": "edits_per_position", "limit": 2, "used": 2}
    add(positions=[41])
    add(positions=[0])
    add(points=["blocks.2"])
    edits.end([1], 9)
    add(positions=[30])


def test_scattered_positions_and_points_count_too():
    scattered = edit(positions=list(range(0, 50, 2)), op="scale", values=b"", rows=0)
    with pytest.raises(QuotaExceeded, match="takes 3,456 bytes"):
        edit_admission.check_room(scattered, ["blocks.1"], EditList(), Limits(edit_bytes_per_session=3455))


def test_the_edits_to_end_are_those_that_have_not_ended():
    edits = filled(edit())
    edits.add(edit(edits=edits), ["blocks.1"])
    edits.end([1], 20)

    def asked(*numbers):
        return admission.numbers_to_end(list(numbers), edits.unended, edits.given, "edit")

    assert admission.numbers_to_end(None, edits.unended, edits.given, "edit") == [2]
    assert asked(1, 2, 2) == [2] and asked(1) == asked() == []
    for number in (0, -1, 3, 1 << 60):
        with pytest.raises(InvalidRequest, match=f"no edit {number}: its edits are 1 to 2"):
            asked(1, number)
    with pytest.raises(InvalidRequest, match="it has had none"):
        admission.numbers_to_end([1], [], 0, "edit")


@pytest.mark.parametrize("changes", [{"blocks": 1}, {"width": 7}])
def test_edits_that_do_not_fit_a_changed_model_are_refused(changes):
    edits = filled(edit())
    edit_admission.check_fit(edits, MODEL)
    other = PointMap(**{"blocks": 4, "width": 8, "vocab": 100} | changes)
    with pytest.raises(InvalidRequest, match="edit 1 of the session no longer fits other"):
        edit_admission.check_fit(edits, ModelInfo(name="other", path="/o", points=other))


def test_names_of_points():
    assert admission.points_named(["blocks.*"] * 2000, MODEL, "capture") == {
        f"blocks.{n}": Point("resid", n + 1) for n in range(4)
    }
    with pytest.raises(InvalidRequest) as refused:
        admission.points_named(["y" * 300], MODEL, "capture")
    assert refused.value.data["field"] == "capture"
