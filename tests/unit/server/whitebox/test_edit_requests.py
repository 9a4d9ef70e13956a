"""Edits of sessions, over real sockets, with a scripted engine: see support/steered.py."""

from __future__ import annotations

import os
import signal
from array import array

import pytest

from djinn_client.protocol import (
    AddEdit,
    CloseSession,
    Done,
    EndEdits,
    Failure,
    ForkSession,
    Generate,
    GetTokens,
    ListEdits,
)
from tests.support.other_user import as_user, only_root, open_to_all
from tests.support.scripted_engine.script import WIDTH, Script
from tests.support.served import wait_for
from tests.support.serving import TINY
from tests.support.steered import STORY, VECTOR, Steered, told

MODEL = "djinn-tiny"


def test_an_edit_without_positions_applies_until_it_is_ended(tenant):
    assert tenant.generate(2, [5, 6, 7]) == told(0, 0, start=3)
    assert tenant.add() == 1
    assert tenant.spans() == {1: [(4, None)]}
    assert tenant.generate(2) == told(1, 1, start=5)
    assert tenant.add(points=["logits"], rows=0, values=b"", op="scale", scale=2.0) == 2
    assert tenant.generate(2) == told(3, 3, start=7)
    assert tenant.info().edits == 2
    assert tenant.end(1) == Done(id=4)
    assert tenant.generate(2) == told(2, 2, start=9)
    assert tenant.spans() == {1: [(4, 8)], 2: [(6, None)]}
    assert (tenant.info().edits, tenant.end(), tenant.info().edits) == (1, Done(id=4), 0)
    assert tenant.generate(1) == told(0, start=11)
    assert tenant.end(1, 2) == tenant.end() == Done(id=4), "they have ended already"
    assert tenant.add() == 3


def test_edits_at_existing_and_future_positions(tenant):
    tenant.generate(2, [5, 6, 7])
    assert tenant.add(positions=[0, 1, 6, 8], rows=4, values=VECTOR * 4) == 1
    assert tenant.spans() == {1: [(0, 2), (6, 7), (8, 9)]}
    assert tenant.generate(6) == told(0, 0, 1, 0, 1, 0, start=5)


def test_an_edit_of_an_empty_session_applies_from_the_first_token(tenant):
    assert tenant.add() == 1
    assert tenant.spans() == {1: [(0, None)]}
    assert tenant.generate(2, [5, 6]) == told(1, 1, start=2)


def test_truncating_keeps_edits_of_the_remaining_positions(tenant):
    tenant.generate(5, [5, 6, 7])
    tenant.add()  # from position 7 on
    tenant.add(positions=[2, 3, 9])
    tenant.generate(4)
    tenant.end(1)
    tenant.add(op="scale", rows=0, values=b"")
    assert tenant.spans() == {1: [(7, 11)], 2: [(2, 4), (9, 10)], 3: [(11, None)]}
    tenant.cut(9)
    assert tenant.spans() == {1: [(7, 9)], 2: [(2, 4), (9, 10)], 3: [(9, None)]}
    assert tenant.generate(2) == told(1, 5, start=9)
    tenant.cut(4)
    assert tenant.spans() == {2: [(2, 4), (9, 10)], 3: [(4, None)]}
    assert tenant.generate(3) == told(2, 3, 3, start=4)


def test_listed_edits_are_as_the_client_made_them(tenant):
    tenant.add(points=["model.layers.2", "blocks.*.hook_resid_pre", "model.layers.2"], op="clamp", high=2.5)
    (info,) = tenant.edits().edits
    assert (info.id, info.points) == (1, ["model.layers.2", "blocks.*.hook_resid_pre"])
    assert (info.op, info.scale, info.low, info.high, info.nbytes) == ("clamp", 1.0, None, 2.5, 4 * WIDTH)


def test_a_fork_has_its_parent_s_edits_and_then_its_own(tenant):
    tenant.generate(1, [5, 6, 7])
    tenant.add()
    fork = tenant.ask(ForkSession(id=8, session=tenant.session)).session
    assert fork.edits == 1
    parent, tenant.session = tenant.session, fork.id
    assert tenant.add() == 2
    assert tenant.generate(1) == told(3, start=4)
    assert tenant.end(1) == Done(id=4)
    assert tenant.generate(1) == told(2, start=5)
    tenant.session = parent
    assert tenant.spans() == {1: [(3, None)]}
    assert tenant.generate(2) == told(1, 1, start=4)
    assert tenant.add() == 2
    assert tenant.ask(CloseSession(id=9, session=fork.id)) == Done(id=9)


def test_patching_the_same_place_repeatedly_keeps_one_edit(serve):
    """A client that goes back to a hit patches repeatedly. It needs no room for the earlier patches."""
    daemon = serve(Script(story=STORY), limits={"edits_per_session": 2, "edit_bytes_per_session": 1200})
    with Steered(daemon.address) as tenant:
        tenant.generate(3, [5, 6, 7])
        patch = {"op": "replace", "positions": [1, 2], "rows": 2, "values": VECTOR * 2}
        assert tenant.add() == 1
        assert [tenant.add(**patch) for _ in range(4)] == [2, 3, 4, 5]
        assert tenant.spans() == {1: [(5, None)], 5: [(1, 3)]}
        assert tenant.add(op="replace").code == "quota_exceeded"
        tenant.cut(2)
        assert tenant.generate(2) == told(5, 6, start=2), "the engine has one of them as well"
    daemon.start_again(kill=True)
    with Steered(daemon.address, tenant.session) as again:
        assert again.spans() == {1: [(2, None)], 5: [(1, 3)]}


REFUSED = [
    ({"points": ["blocks.8"]}, "no point 'blocks.8'"),
    ({"points": []}, "name the points"),
    ({"points": ["blocks.1", "logits"]}, "wide"),
    ({"values": VECTOR[4:]}, "the values are [1, 7], and blocks.3 is 8 wide"),
    ({"values": VECTOR[4:] + array("f", [float("nan")]).tobytes()}, "at index 7"),
    ({"positions": [4, 2]}, "positions ascend"),
    ({"positions": [256]}, "position 256 never comes"),
    ({"op": "project_out", "values": bytes(4 * WIDTH)}, "direction"),
    ({"scale": float("inf")}, "scale is inf"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED)
def test_a_refused_edit_leaves_the_session_unchanged(tenant, fields, words):
    tenant.generate(1, [5, 6])
    reply = tenant.add(**fields)
    assert isinstance(reply, Failure) and (reply.id, reply.code) == (3, "invalid_request") and words in reply.message
    assert tenant.spans() == {}
    assert tenant.generate(1) == told(0, start=3)
    assert tenant.add() == 1, "no number is used up"


def test_limits_of_a_session(serve):
    daemon = serve(Script(story=STORY), limits={"edits_per_session": 3, "edit_bytes_per_session": 2000})
    with Steered(daemon.address) as tenant, Steered(daemon.address) as other:
        tenant.generate(1, [5, 6])
        for _ in range(3):
            tenant.add()
        refused = tenant.add()
        assert (refused.code, refused.data) == ("quota_exceeded", {"quota": "edits_per_session", "limit": 3, "used": 3})
        assert "limits.edits_per_session is 3" in refused.message and other.add() == 1
        tenant.end()
        assert tenant.spans() == {} and tenant.add() == 4, "the ended ones had changed nothing"
        daemon.reload(limits={"edits_per_session": 10, "edit_bytes_per_session": 1400})
        assert [tenant.add() for _ in range(2)] == [5, 6]
        refused = tenant.add()
        assert (refused.code, refused.data["used"], refused.data["needed"]) == ("quota_exceeded", 3 * 416, 416)


def test_an_edit_that_never_existed_cannot_be_ended(tenant):
    assert "it has had none" in tenant.end(1).message
    tenant.add()
    assert "no edit 2: its edits are 1 to 1" in tenant.end(1, 2).message
    assert tenant.spans() == {1: [(0, None)]}


def test_edits_cannot_change_during_a_call_and_can_be_listed(serve):
    daemon = serve(Script(story=STORY), gated=True)
    with Steered(daemon.address) as tenant:
        tenant.add()
        tenant.send(Generate(id=2, session=tenant.session, token_ids=[5], max_tokens=1))
        assert tenant.add().code == tenant.end().code == "session_busy"
        assert tenant.spans() == {1: [(0, None)]}
        daemon.step()
        assert tenant.reply().token_ids == told(1, start=1)
        assert tenant.add() == 2


@only_root
def test_another_user_s_edits_look_like_those_of_an_unknown_session(storyteller, tenant):
    """The errors are the same as for a session that does not exist."""
    open_to_all(storyteller.folder, storyteller.address)
    tenant.add()
    with as_user():
        stranger = Steered(storyteller.address)
    with stranger:
        for session in (tenant.session, "0123456789abcdef"):
            for request in (
                AddEdit(id=3, session=session, points=["blocks.1"], rows=1, values=VECTOR),
                EndEdits(id=3, session=session),
                ListEdits(id=3, session=session),
                Generate(id=3, session=session, capture=["blocks.1"]),
            ):
                reply = stranger.ask(request)
                assert (reply.code, reply.data) == ("session_not_found", {"session": session})
    assert tenant.spans() == {1: [(0, None)]}


def test_the_next_engine_gets_the_edits_and_a_failed_call_changes_none(serve):
    daemon = serve(Script(story=STORY, on_token={"66": "die", "77": "fail"}))
    with Steered(daemon.address) as tenant, daemon.client() as client:
        tenant.generate(2, [5, 6, 7])
        tenant.add()
        tenant.add(positions=[1, 6])
        tenant.end(1)
        tenant.add()
        before = tenant.spans()
        assert before == {2: [(1, 2), (6, 7)], 3: [(4, None)]}
        for token, code in ((77, "out_of_memory"), (66, "engine_lost"), (77, "out_of_memory")):
            reply = tenant.ask(Generate(id=2, session=tenant.session, token_ids=[token], max_tokens=5))
            assert reply.code == code
            wait_for(lambda: client.status().models[0].state == "ready")
            assert tenant.spans() == before
        assert tenant.generate(3) == told(3, 3, 5, start=5)
        assert tenant.add() == 4


def test_edits_made_without_an_engine(serve):
    """The session changes at once; the next engine gets the edits."""
    daemon = serve(Script(story=STORY), models={MODEL: {"path": str(TINY), "keep_alive": "150ms"}})
    with Steered(daemon.address) as tenant, daemon.client() as client:
        tenant.generate(1, [5])
        wait_for(lambda: client.models()[0].state == "asleep")
        assert (tenant.add(), tenant.add()) == (1, 2)
        assert tenant.end(1) == Done(id=4)
        assert tenant.spans() == {2: [(1, None)]}
        tenant.cut(1)
        assert client.models()[0].state == "asleep", "edits need no device"
        assert tenant.generate(2) == told(0, 2, start=1)
        (pid,) = (device.pid for device in client.status().devices)
        os.kill(pid, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 1)
        assert tenant.add() == 3
        assert tenant.generate(1) == told(5, start=3)


def test_edits_survive_a_stopped_and_a_killed_daemon(serve):
    daemon = serve(Script(story=STORY))
    with Steered(daemon.address) as tenant:
        tenant.generate(5, [5, 6, 7])
        tenant.add(points=["blocks.*", "hook_embed"])
        tenant.add(positions=[1, 9])
        tenant.add()
        tenant.end(3)  # which removes it completely
        tenant.generate(4)
        tenant.end(1)
        tenant.add()
        tenant.cut(10)
        before = tenant.edits()
        fork = tenant.ask(ForkSession(id=8, session=tenant.session)).session.id
        assert tenant.spans() == {1: [(7, 10)], 2: [(1, 2), (9, 10)], 4: [(10, None)]}
        name = tenant.session
    for kill in (True, False):
        daemon.start_again(kill=kill)
        for session in (name, fork):
            with Steered(daemon.address, session) as again:
                assert again.edits() == before
                assert again.info().edits == 2
                tokens = again.ask(GetTokens(id=6, session=session)).token_ids
                assert again.generate(2) == told(3, 4, start=10)
                again.cut(10)
                assert again.ask(GetTokens(id=6, session=session)).token_ids == tokens
    with Steered(daemon.address, name) as again:
        assert again.add() == 5, "numbers are not reused"
        again.end()
        assert again.spans() == {1: [(7, 10)], 2: [(1, 2)]}
