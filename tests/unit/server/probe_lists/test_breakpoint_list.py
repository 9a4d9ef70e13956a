from __future__ import annotations

import msgspec
import pytest

from djinn_client.protocol.fields.breakpoints import HitInfo
from djinnd.core.edits import Extent
from djinnd.core.stops import Stop
from djinnd.server.probe_lists.breakpoint_list import BreakpointList, CallSpan, SessionBreakpoint

PROMPT = CallSpan(first=10, prompt_end=20, length=20, end=50)  # ten prompt positions, thirty that may be generated


def hit(block, first, end, prompt_end=20):
    return HitInfo(breakpoint=1, point="p", block=block, first=first, end=end, prompt_end=prompt_end)


def stops(reach, *breakpoints):
    listed = BreakpointList()
    for number, (block, fields) in enumerate(breakpoints, 1):
        spans = fields.pop("spans", None)
        extents = None if spans is None else tuple(Extent(*span) for span in spans)
        listed.add(SessionBreakpoint(number, f"p{number}", block, extents=extents, **fields))
    return {stop.block: stop.position for stop in listed.stops(reach)}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, 10),
        ({"when": "prefill"}, 10),
        ({"when": "decode"}, 20),
        ({"when": "decode", "every": 4}, 23),
        ({"every": 4}, 10),
        ({"when": "always"}, 10),  # "every" in the words of older journals
        ({"when": "decode", "every": 30}, 49),
        ({"when": "decode", "every": 31}, None),
        ({"spans": [(2, 4), (8, 12), (19, 22), (60, 61)]}, 10),
        ({"spans": [(2, 4), (12, 14), (19, 22)]}, 12),
        ({"spans": [(19, 22)], "when": "prefill"}, 19),
        ({"spans": [(20, 22)], "when": "prefill"}, None),
        ({"spans": [(19, 22)], "when": "decode"}, 20),
        ({"spans": [(50, 52)]}, None),
        ({"spans": [(2, 4)]}, None),
    ],
)
def test_the_first_position_at_which_a_breakpoint_stops(fields, expected):
    assert stops(PROMPT, (3, fields)) == ({} if expected is None else {3: expected})


def test_breakpoints_of_a_block_are_one_stop_and_blocks_ascend():
    found = stops(
        PROMPT,
        (5, {"spans": [(30, 31)]}),
        (3, {"when": "decode"}),
        (5, {"spans": [(11, 13), (15, 16)]}),
        (5, {"spans": [(12, 14), (16, 17)]}),
        (0, {"every": 2}),
    )
    assert list(found.items()) == [(0, 10), (3, 20), (5, 11)]


def test_a_call_that_continues_stops_at_later_places_only():
    """It stops at the hit's positions at later blocks, and behind them at any block."""
    prompt = CallSpan(10, 20, 20, 50, hit(3, 10, 20))
    found = stops(prompt, (3, {}), (2, {"when": "prefill"}), (5, {"spans": [(12, 13)]}), (4, {"every": 3}))
    assert found == {3: 20, 4: 10, 5: 12}


def test_every_nth_counts_from_the_prompt_of_the_stopped_call():
    for position, following in ((22, 25), (23, 25), (25, 28)):
        reach = CallSpan(position, 20, position + 1, 60, hit(3, position, position + 1))
        assert stops(reach, (3, {"when": "decode", "every": 3})) == {3: following}
    again = CallSpan(22, 20, 26, 60, hit(3, 25, 26))  # an edit has made earlier positions due
    assert stops(again, (5, {"when": "decode", "every": 3})) == {5: 22}


def test_a_call_behind_its_prompt_has_no_prefill_left():
    reach = CallSpan(25, 20, 26, 60, hit(3, 25, 26))
    assert stops(reach, (5, {"when": "prefill"})) == {}


def test_met_is_the_first_breakpoint_that_stopped_the_call():
    listed = BreakpointList()
    listed.add(SessionBreakpoint(1, "a", 3, "decode"))
    listed.add(SessionBreakpoint(2, "b", 4))
    listed.add(SessionBreakpoint(3, "c", 3, "prefill"))
    listed.add(SessionBreakpoint(4, "d", 3))
    assert listed.met(3, 20, PROMPT).point == "c"
    assert listed.met(3, 21, PROMPT).point == "a"
    listed.end([1, 3])
    assert listed.met(3, 21, PROMPT).point == "d"


def test_a_long_session_with_many_breakpoints_takes_no_time():
    """Work for each position would hold up the server, and so all clients."""
    listed = BreakpointList()
    for number in range(1, 1001):
        listed.add(SessionBreakpoint(number, "p", number % 7, "decode", every=2))
    for _ in range(20):
        listed.stops(CallSpan(0, 0, 1 << 40, 1 << 41, hit(0, 0, 1 << 40, 0)))


def test_numbers_spans_and_copies():
    listed = BreakpointList()
    listed.add(SessionBreakpoint(1, "a", 3, extents=(Extent(2, 4), Extent(9, 10))))
    listed.add(SessionBreakpoint(2, "b", 3))
    listed.hit = hit(3, 1, 2)
    assert listed.count == 3
    assert [each.info.spans for each in listed.breakpoints] == [[(2, 4), (9, 10)], None]
    fork = listed.copy()
    fork.add(SessionBreakpoint(3, "c", 1))
    fork.end([1, 2])
    assert fork.hit is None and [each.number for each in fork.breakpoints] == [3]
    assert len(listed.breakpoints) == 2 and listed.hit is not None
    encoded = msgspec.msgpack.encode(listed)
    assert msgspec.msgpack.decode(encoded, type=BreakpointList) == listed


def test_stops_are_values():
    assert BreakpointList().stops(PROMPT) == []
    listed = BreakpointList((SessionBreakpoint(1, "a", 2),), 1)
    assert listed.stops(PROMPT) == [Stop(2, 10)]
