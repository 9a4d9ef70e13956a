"""Breakpoints and hits of sessions, over real sockets, with a scripted engine: see support/steered.py."""

from __future__ import annotations

import os

import pytest

from djinn_client.protocol import (
    AddBreakpoint,
    Cancel,
    CloseSession,
    Done,
    EndBreakpoints,
    Failure,
    ForkSession,
    Forward,
    Generate,
    Generated,
    ListBreakpoints,
    PauseSession,
)
from djinn_client.protocol.fields.breakpoints import HitInfo
from tests.support.other_user import as_user, only_root, open_to_all
from tests.support.scripted_engine.script import BLOCKS, Script
from tests.support.served import wait_for
from tests.support.steered import STORY, Steered, told


def call(tenant, count=8, prompt=None, **fields):
    """Returns the final reply. If it is a hit, checks the window that came with it: each row has its position's
    number."""
    tokens = None if prompt is None else list(prompt)
    reply = tenant.call(**{"token_ids": tokens, "max_tokens": count, "ignore_eos": True} | fields)
    if isinstance(reply, Generated):
        assert (reply.finish_reason == "breakpoint") == (reply.hit is not None) == (reply.captured is not None)
    if isinstance(reply, Generated) and reply.hit is not None:
        (seen,) = tenant.take(reply.captured).values()
        assert len(seen) == reply.hit.end - reply.hit.first == reply.captured.positions
        assert reply.captured.first == reply.hit.first and reply.usage.session_tokens == reply.hit.end
        assert [point.name for point in reply.captured.points] == [reply.hit.point]
    return reply


def where(reply):
    return reply.hit.breakpoint, reply.hit.block, reply.hit.first, reply.hit.end


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_stops_and_continues_as_if_it_had_not_stopped(tenant, stream):
    assert tenant.stop_at("blocks.3") == 1
    first = call(tenant, 4, [5, 6, 7], stream=stream)
    assert where(first) == (1, 4, 0, 3) and first.hit.point == "blocks.3" and first.token_ids == []
    assert (tenant.info().state, tenant.info().hit) == ("stopped", first.hit)
    tokens = []
    for position in range(3, 6):
        reply = call(tenant, 4, resume=True, stream=stream)
        assert where(reply) == (1, 4, position, position + 1) and reply.hit.prompt_end == 3
        tokens += reply.token_ids if not stream else told(0, start=position)
    assert tokens == told(0, 0, 0, start=3)
    assert tenant.no_stop() == Done(id=11) and tenant.breakpoints() == []
    assert tenant.info().state == "stopped", "the hit stays without the breakpoint"
    reply = call(tenant, 2, resume=True, stream=stream)
    assert (reply.hit, reply.finish_reason, reply.usage.session_tokens) == (None, "length", 8)
    assert (tenant.info().state, tenant.info().hit) == ("idle", None)


def test_breakpoints_stop_one_after_another_in_the_order_of_the_blocks(tenant):
    for point in ("model.layers.7", "hook_embed", "blocks.3.hook_resid_pre", "blocks.2"):
        tenant.stop_at(point, when="prefill")
    seen = [call(tenant, 4, [5, 6, 7])]
    while seen[-1].hit:
        seen.append(call(tenant, 4, resume=True))
    assert [where(reply) for reply in seen[:-1]] == [(2, 0, 0, 3), (3, 3, 0, 3), (1, BLOCKS, 0, 3)]
    assert seen[-1].token_ids == told(0, 0, 0, 0, start=3)
    info = tenant.breakpoints()[0]
    assert (info.id, info.point, info.when) == (1, "model.layers.7", "prefill")


def test_every_nth_generated_position_stops(tenant):
    tenant.stop_at(when="decode", every=3)
    reply, ends = call(tenant, 10, [5, 6, 7]), []
    while reply.hit:
        ends.append(reply.hit.first)
        reply = call(tenant, 10 - (reply.hit.end - 3), resume=True)
    assert ends == [5, 8, 11] and reply.usage.session_tokens == 13


def test_breakpoints_at_positions(tenant):
    assert tenant.stop_at(positions=[1, 2, 5]) == 1
    assert tenant.breakpoints()[0].spans == [(1, 3), (5, 6)]
    assert where(call(tenant, 6, [5, 6, 7])) == (1, 4, 1, 3)
    assert where(call(tenant, 6, resume=True)) == (1, 4, 5, 6)
    assert call(tenant, 3, resume=True).hit is None
    assert call(tenant, 3, [8]).hit is None


def test_an_edit_at_a_hit_applies_when_the_call_continues(tenant):
    tenant.stop_at(when="prefill")
    call(tenant, 4, [5, 6, 7])
    assert tenant.add(positions=[2], op="replace", points=["blocks.3"]) == 1
    assert tenant.info().state == "stopped"
    assert call(tenant, 2, resume=True).token_ids == told(1, 0, start=3)


REFUSED_BREAKPOINTS = [
    ({"point": "blocks.8"}, "no point 'blocks.8'"),
    ({"point": "blocks.3.attn.hook_out"}, "the nearest is blocks.3.hook_resid_pre"),
    ({"point": "model.layers.3.mlp"}, "the nearest is blocks.3.hook_resid_post"),
    ({"point": "model.norm"}, "the nearest is blocks.7.hook_resid_post"),
    ({"point": "logits"}, "the nearest is blocks.7.hook_resid_post"),
    ({"point": "x" * 300}, "300 characters"),
    ({"point": "blocks.*"}, "a breakpoint is at one point"),
    ({"every": 0}, "every is 0; it must be 1 or more"),
    ({"every": 2, "when": "prefill"}, "every counts generated positions"),
    ({"every": 2, "positions": [1]}, "leave every out"),
    ({"positions": []}, "positions is empty"),
    ({"positions": [4, 2]}, "positions ascend"),
    ({"positions": [-1]}, "negative"),
    ({"positions": [256]}, "position 256 never comes"),
]


@pytest.mark.parametrize(("fields", "words"), REFUSED_BREAKPOINTS)
def test_invalid_breakpoints_are_refused(tenant, fields, words):
    reply = tenant.stop_at(**fields)
    assert isinstance(reply, Failure) and (reply.id, reply.code) == (10, "invalid_request") and words in reply.message
    assert tenant.breakpoints() == [] and tenant.generate(2, [5]) == told(0, 0, start=1)


def test_a_breakpoint_that_never_existed_cannot_be_ended(tenant):
    assert "it has had none" in tenant.no_stop(1).message
    tenant.stop_at()
    assert "no breakpoint 2: its breakpoints are 1 to 1" in tenant.no_stop(1, 2).message
    assert len(tenant.breakpoints()) == 1
    assert tenant.no_stop(1) == tenant.no_stop(1) == tenant.no_stop() == Done(id=11)
    assert tenant.stop_at() == 2


def test_a_call_without_a_valid_hit_cannot_continue(tenant):
    def refusal(**fields):
        reply = call(tenant, **fields)
        assert isinstance(reply, Failure) and reply.code == "invalid_request", reply
        return reply.message

    call(tenant, 2, [5, 6, 7])
    assert "the session is at no hit" in refusal(resume=True)
    tenant.stop_at(when="prefill")
    hit = call(tenant, 2, [8, 9]).hit
    assert "takes no prompt" in refusal(resume=True, prompt=[4])
    assert "cannot capture" in refusal(resume=True, capture=["blocks.3"]), "even if it could not stop any more"
    assert "needs resume" in refusal(hit=hit)
    assert "truncate it to 6" in refusal(resume=True, hit=HitInfo(**as_fields(hit) | {"end": 6}))
    for wrong in ({"first": 7}, {"first": -1}, {"block": BLOCKS + 1}, {"prompt_end": 8}):
        assert "no call of this session has stopped there" in refusal(
            resume=True, hit=HitInfo(**as_fields(hit) | wrong)
        )
    assert tenant.info().hit == hit, "the refusals have not moved it"
    tenant.cut(7)
    assert tenant.info().hit == hit
    assert call(tenant, 2, resume=True).token_ids == told(0, 0, start=7)
    assert "the session is at no hit" in refusal(resume=True), "the hit can be used once"
    tenant.no_stop()
    tenant.stop_at(when="decode")
    call(tenant, 4)
    tenant.cut(8)
    assert "the session is at no hit" in refusal(resume=True), "after it was cut"
    assert tenant.info().state == "idle"


def as_fields(hit):
    return {name: getattr(hit, name) for name in hit.__struct_fields__}


def test_another_call_leaves_the_hit_behind(tenant):
    tenant.stop_at(positions=[1])
    assert where(call(tenant, 2, [5, 6, 7])) == (1, 4, 1, 3)
    assert call(tenant, 2, [8]).hit.first == 1, "the hit's positions are still due"
    tenant.no_stop()
    assert call(tenant, 2, [9]).token_ids == told(0, 0, start=5)
    tenant.stop_at(when="decode")
    hit = call(tenant, 2).hit
    reply = tenant.ask(Forward(id=3, session=tenant.session, token_ids=[1, 2]))
    os.close(tenant.take_fd())
    assert reply.tokens == 2 and tenant.info().hit is None and hit.end == 8


def test_a_call_that_captures_runs_past_breakpoints(tenant):
    tenant.stop_at()
    reply = tenant.ask(
        Generate(id=2, session=tenant.session, token_ids=[5, 6], max_tokens=4, capture=["blocks.1"], ignore_eos=True)
    )
    assert reply.hit is None and reply.finish_reason == "length"
    assert len(tenant.take(reply.captured)["blocks.1"]) == 2 + 3
    assert tenant.info().hit is None


def test_a_call_continues_from_an_earlier_hit_also_on_a_fork(tenant):
    tenant.stop_at("blocks.1", when="prefill")
    tenant.stop_at("blocks.5", when="prefill")
    earlier = call(tenant, 4, [5, 6, 7]).hit
    later = call(tenant, 4, resume=True).hit
    assert (earlier.block, later.block) == (2, 6)
    assert call(tenant, 4, resume=True, hit=earlier).hit == later, "it goes back, and stops after that"
    call(tenant, 4, resume=True)
    fork = tenant.ask(ForkSession(id=8, session=tenant.session)).session
    assert (fork.state, fork.hit) == ("idle", None)
    parent, tenant.session = tenant.session, fork.id
    assert [info.id for info in tenant.breakpoints()] == [1, 2]
    tenant.cut(3)
    tenant.add(positions=[2])
    assert call(tenant, 2, resume=True, hit=later).token_ids == told(1, 0, start=3)
    assert tenant.ask(CloseSession(id=9, session=fork.id)) == Done(id=9)
    tenant.session = parent
    assert tenant.info().tokens == 7


def test_a_fork_of_a_session_at_a_hit_begins_at_the_hit(tenant):
    tenant.stop_at(positions=[0])
    call(tenant, 4, [5, 6, 7])
    fork = tenant.ask(ForkSession(id=8, session=tenant.session)).session
    parent, tenant.session = tenant.session, fork.id
    assert where(call(tenant, 1)) == (1, 4, 0, 3), "the hit's positions are due in the fork too"
    assert tenant.ask(CloseSession(id=9, session=fork.id)) == Done(id=9)
    tenant.session = parent
    assert tenant.info().state == "stopped"


def test_a_stop_string_before_a_breakpoint_wins(tenant, tiny):
    """The engine may have reached the breakpoint before it received the Halt. The session is at no hit then."""
    tenant.stop_at(positions=[60])
    reply = call(tenant, 20, [5, 6, 7], stop=[tiny.decode(told(0, 0, 0, 0, start=3))])
    assert (reply.finish_reason, reply.hit) == ("stop", None) and reply.usage.session_tokens < 60
    assert tenant.info().state == "idle"


def test_a_call_that_fails_leaves_the_session_at_its_hit(tenant, storyteller):
    tenant.stop_at(when="prefill")
    hit = call(tenant, 4, [5, 6, 7]).hit
    for token, code in ((77, "out_of_memory"), (66, "engine_lost")):
        assert call(tenant, 4, [token]).code == code
        with storyteller.client() as client:
            wait_for(lambda: client.status().models[0].state == "ready")
        assert (tenant.info().state, tenant.info().hit) == ("stopped", hit)
    assert call(tenant, 2, resume=True).token_ids == told(0, 0, start=3), "the next engine runs it again"


def test_a_call_that_is_cancelled_before_it_continued_leaves_the_session_at_its_hit(serve):
    daemon = serve(Script(story=STORY), gated=True)
    with Steered(daemon.address) as tenant:
        tenant.stop_at(when="prefill")
        tenant.send(Generate(id=2, session=tenant.session, token_ids=[5, 6], max_tokens=4))
        daemon.step()
        hit = tenant.reply().hit
        os.close(tenant.take_fd())
        assert tenant.ask(Generate(id=3, session=tenant.session, resume=True, token_ids=[4])).code == "invalid_request"
        tenant.send(Generate(id=4, session=tenant.session, resume=True, max_tokens=4))
        assert tenant.stop_at().code == tenant.no_stop().code == "session_busy"
        tenant.send(Cancel(target=4))
        assert tenant.reply().finish_reason == "cancelled"
        assert tenant.info().hit == hit
        tenant.send(Generate(id=5, session=tenant.session, resume=True, max_tokens=1, ignore_eos=True))
        daemon.step()
        assert tenant.reply().token_ids == told(0, start=2)


def test_continuing_ends_a_pause(tenant):
    tenant.stop_at(when="prefill")
    call(tenant, 4, [5, 6, 7])
    tenant.ask(PauseSession(id=8, session=tenant.session))
    assert tenant.info().state == "paused"
    assert call(tenant, 2, resume=True).token_ids == told(0, 0, start=3)
    assert tenant.info().state == "idle"


def test_limits_of_a_session(serve):
    daemon = serve(Script(story=STORY), limits={"breakpoints_per_session": 4})
    with Steered(daemon.address) as tenant:
        assert [tenant.stop_at(), tenant.stop_at(positions=[1, 2, 5])] == [1, 2]
        refused = tenant.stop_at(positions=[1, 3])
        assert (refused.code, refused.data) == (
            "quota_exceeded",
            {"quota": "breakpoints_per_session", "limit": 4, "used": 3, "needed": 2},
        )
        assert "limits.breakpoints_per_session is 4" in refused.message
        assert tenant.stop_at() == 3 and tenant.stop_at().code == "quota_exceeded"
        tenant.no_stop(2)
        assert [tenant.stop_at(), tenant.stop_at()] == [4, 5]


def test_activations_of_a_prompt_that_exceed_the_limit(serve):
    """A gibibyte of rows of 8 numbers needs more than any context here, so the check itself is called."""
    from djinn_client.errors import InvalidRequest
    from djinn_client.protocol import ModelInfo
    from djinn_client.protocol.fields.points import PointMap
    from djinnd.server.admission import breakpoints as breakpoint_admission
    from djinnd.server.probe_lists.breakpoint_list import BreakpointList, CallSpan, SessionBreakpoint

    model = ModelInfo(
        name="m", path="/m", dtype="bfloat16", max_context=1 << 20, points=PointMap(blocks=4, width=1 << 10, vocab=9)
    )
    listed = BreakpointList((SessionBreakpoint(1, "blocks.1", 2),), 1)
    request = Generate(id=1, session="s", max_tokens=4)
    most = (1 << 30) // (2 << 10)
    assert breakpoint_admission.stops_of(request, CallSpan(5, most + 5, most + 5, most + 8), listed, model)
    with pytest.raises(InvalidRequest, match=rf"{most + 1:,} positions .* send the prompt in parts"):
        breakpoint_admission.stops_of(request, CallSpan(4, most + 5, most + 5, most + 8), listed, model)


@only_root
def test_another_user_s_breakpoints_look_like_those_of_an_unknown_session(storyteller, tenant):
    open_to_all(storyteller.folder, storyteller.address)
    tenant.stop_at(when="prefill")
    hit = call(tenant, 2, [5, 6]).hit
    with as_user():
        stranger = Steered(storyteller.address)
    with stranger:
        for session in (tenant.session, "0123456789abcdef"):
            for request in (
                AddBreakpoint(id=3, session=session, point="blocks.1"),
                EndBreakpoints(id=3, session=session),
                ListBreakpoints(id=3, session=session),
                Generate(id=3, session=session, resume=True),
                Generate(id=3, session=session, resume=True, hit=hit),
            ):
                reply = stranger.ask(request)
                assert (reply.code, reply.data) == ("session_not_found", {"session": session})
    assert tenant.info().hit == hit


def test_breakpoints_and_hits_survive_a_stopped_and_a_killed_daemon(serve):
    daemon = serve(Script(story=STORY))
    with Steered(daemon.address) as tenant:
        tenant.stop_at("model.layers.3", when="decode", every=2)
        tenant.stop_at(positions=[1, 2, 200])
        tenant.stop_at()
        tenant.no_stop(3)
        call(tenant, 8, [5, 6, 7])
        hit = call(tenant, 8, resume=True).hit
        assert (hit.first, hit.end, hit.prompt_end) == (4, 5, 3)
        before, name = tenant.breakpoints(), tenant.session
        gone_on = tenant.ask(ForkSession(id=8, session=name)).session.id
    with Steered(daemon.address, gone_on) as fork:
        call(fork, 1, [9])
    for kill in (True, False):
        daemon.start_again(kill=kill)
        with Steered(daemon.address, name) as again:
            assert again.breakpoints() == before and again.info().hit == hit
            assert again.info().state == "stopped"
        with Steered(daemon.address, gone_on) as again:
            assert again.breakpoints() == before and again.info().hit is None
    with Steered(daemon.address, name) as again:
        reply = call(again, 8, resume=True)
        assert where(reply) == (1, 4, 6, 7) and reply.hit.prompt_end == 3
        assert again.stop_at() == 4, "numbers are not reused"
        again.cut(6)
    daemon.start_again(kill=True)
    with Steered(daemon.address, name) as again:
        assert again.info().hit is None and len(again.breakpoints()) == 3
