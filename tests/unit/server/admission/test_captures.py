from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from djinn_client.errors import InvalidRequest
from djinn_client.protocol import Cancel, Failure, Generate, Generated, ModelInfo
from djinn_client.protocol.fields.edits import CapturedPoint
from djinn_client.protocol.fields.points import Point, PointMap
from djinnd.core.edits import FOREVER
from djinnd.messages import CaptureLayout
from djinnd.server.admission.captures import MAX_CAPTURE_BYTES, capture_of
from tests.support.scripted_engine.script import WIDTH, Script
from tests.support.served import wait_for
from tests.support.steered import STORY, Steered, told

POINTS = PointMap(blocks=4, width=1 << 10, vocab=1 << 16, attention="self_attn", norm="model.norm")
MODEL = ModelInfo(name="m", path="/m", vocab=1 << 16, max_context=1 << 20, points=POINTS, dtype="bfloat16")


@dataclass
class FakeSession:
    tokens: list[int] = field(default_factory=list)
    due_from: int = FOREVER


def capture(prompt_tokens=3, session=None, max_tokens=4, names=("blocks.1",)):
    request = Generate(id=1, session="s", max_tokens=max_tokens, capture=list(names))
    session = session or FakeSession()
    return capture_of(request, prompt_tokens, session, MODEL, len(session.tokens))


def test_a_point_is_captured_once_and_reported_by_all_its_names():
    taken = capture(names=["blocks.1", "logits", "blocks.2.hook_resid_pre", "blocks.1"])
    assert taken.points == [Point("resid", 2), Point("logits")]
    told = taken.told(
        CaptureLayout("bfloat16", first=7, positions=9, room=12, nbytes=9000, offsets=[0, 4096]), positions=8
    )
    assert (told.dtype, told.first, told.positions, told.room, told.nbytes) == ("bfloat16", 7, 8, 12, 9000)
    assert told.points == [
        CapturedPoint("blocks.1", 1 << 10, 0),
        CapturedPoint("logits", 1 << 16, 4096),
        CapturedPoint("blocks.2.hook_resid_pre", 1 << 10, 0),
    ]


def test_a_capture_without_points_is_none():
    assert capture(names=[]) is None


def rows(**fields):
    """The positions that the call may compute, from the error just beyond the limit."""
    most = MAX_CAPTURE_BYTES // (2 << 10)
    with pytest.raises(InvalidRequest, match=rf"at most {most:,} positions") as refused:
        capture(**fields)
    return refused.value.data["positions"] - most


def test_the_limit_of_a_gibibyte_per_call_is_told_with_figure_and_remedy():
    most = MAX_CAPTURE_BYTES // (2 << 10)
    capture(prompt_tokens=most, max_tokens=0)
    capture(prompt_tokens=most, max_tokens=1)
    capture(prompt_tokens=0, session=FakeSession([1]), max_tokens=most)
    assert rows(prompt_tokens=most + 1, max_tokens=0) == 1
    assert rows(prompt_tokens=most, max_tokens=2) == 1
    assert rows(prompt_tokens=0, session=FakeSession([1] * 5), max_tokens=most + 1) == 1
    assert rows(prompt_tokens=most, session=FakeSession([1] * 5, due_from=2), max_tokens=0) == 3
    with pytest.raises(InvalidRequest, match="1 points of 524,289 positions are 1,073,743,872 bytes of bfloat16"):
        capture(prompt_tokens=most + 1, max_tokens=0)


def test_positions_beyond_the_context_do_not_count():
    with pytest.raises(InvalidRequest) as refused:
        capture(prompt_tokens=5, max_tokens=1 << 30)
    assert refused.value.data["positions"] == MODEL.max_context


def test_an_unknown_point():
    with pytest.raises(InvalidRequest, match=r"no point 'blocks\.9'"):
        capture(names=["blocks.9"])


# --- over real sockets, with a scripted engine ----------------------------------------------------------------------


def ask(tenant, count, prompt=(), names=("blocks.3",), **fields):
    """Sends a call that captures, and returns the final reply."""
    return tenant.call(token_ids=list(prompt), max_tokens=count, capture=list(names), **fields)


@pytest.mark.parametrize("stream", [False, True])
def test_the_positions_that_a_call_computes_are_captured(tenant, stream):
    names = ["blocks.*", "logits", "hook_embed", "model.layers.7"]
    reply = ask(tenant, 4, [5, 6, 7], names, stream=stream)
    assert (reply.captured.first, reply.captured.positions, reply.captured.dtype) == (0, 6, "float32")
    assert [point.name for point in reply.captured.points] == [f"blocks.{n}" for n in range(8)] + names[1:]
    assert {point.width for point in reply.captured.points if point.name != "logits"} == {WIDTH}
    seen = tenant.take(reply.captured)
    assert all(rows == [0, 1, 2, 3, 4, 5] for rows in seen.values())
    reply = ask(tenant, 2, stream=stream)
    assert tenant.take(reply.captured) == {"blocks.3": [6, 7]}, "from the last position on, which is computed again"
    reply = ask(tenant, 1, [9], stream=stream)
    assert tenant.take(reply.captured) == {"blocks.3": [9]}


def test_capturing_a_prompt_only(tenant):
    reply = ask(tenant, 0, [5, 6, 7])
    assert (reply.token_ids, reply.finish_reason, reply.usage.session_tokens) == ([], "length", 3)
    assert tenant.take(reply.captured) == {"blocks.3": [0, 1, 2]}
    assert tenant.take(ask(tenant, 0).captured) == {"blocks.3": [2]}
    assert tenant.take(ask(tenant, 0, [8] * 253).captured) == {"blocks.3": list(range(3, 256))}


def test_edited_positions_are_computed_again_and_captured_as_edited(tenant):
    tenant.generate(5, [5, 6, 7])
    tenant.add(positions=[2, 4])
    assert tenant.take(ask(tenant, 1, [9]).captured) == {"blocks.3": [3, 3, 5, 5, 6, 7, 8]}
    assert tenant.take(ask(tenant, 1, [9]).captured) == {"blocks.3": [10]}, "once"
    tenant.add()
    assert tenant.take(ask(tenant, 2).captured) == {"blocks.3": [13, 14]}


def test_a_stop_string_ends_the_capture_where_it_ends_the_call(tenant, tiny):
    """The reply is the same whether or not the engine has gone on before it received the Halt."""
    reply = ask(tenant, 200, [5, 6, 7], stop=[tiny.decode(told(0, 0, 0, 0, start=3))])
    length = reply.usage.session_tokens
    assert reply.finish_reason == "stop" and length < 100
    assert tenant.take(reply.captured) == {"blocks.3": list(range(length - 1))}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"names": ["blocks.8"]}, "no point 'blocks.8'"),
        ({"names": ["x" * 1_000]}, "1,000 characters"),
        ({"count": -1}, "max_tokens is -1; it must be from 0 to 2147483647"),
        ({"prompt": [], "count": 0}, "the session is empty"),
    ],
)
def test_invalid_captures_are_refused(tenant, fields, words):
    reply = ask(tenant, **{"count": 1, "prompt": [5, 6]} | fields)
    assert isinstance(reply, Failure) and reply.code == "invalid_request" and words in reply.message
    assert tenant.generate(1, [5]) == told(0, start=1)


def test_a_call_that_fails_and_one_whose_engine_dies_bring_nothing(tenant, storyteller):
    assert ask(tenant, 3, [77]).code == "out_of_memory"
    assert ask(tenant, 3, [66]).code == "engine_lost"
    with storyteller.client() as client:
        wait_for(lambda: client.status().models[0].state == "ready")
    assert tenant.take(ask(tenant, 1, [5]).captured) == {"blocks.3": [0]}


def test_a_cancelled_or_disconnected_client_gets_no_window_and_leaves_none(serve):
    daemon = serve(Script(story=STORY), gated=True)
    with Steered(daemon.address) as tenant, daemon.client() as client:
        request = Generate(id=2, session=tenant.session, token_ids=[5], max_tokens=3, capture=["blocks.3"])
        daemon.step()
        tenant.send(request)
        wait_for(lambda: tenant.info().state == "running")
        tenant.send(Cancel(target=2))
        reply = tenant.reply()
        assert isinstance(reply, Generated) and (reply.finish_reason, reply.captured) == ("cancelled", None)
        with Steered(daemon.address, tenant.session) as gone:
            gone.send(request)
            wait_for(lambda: tenant.info().state != "idle")
            connections = client.status().connections
        wait_for(lambda: client.status().connections == connections - 1)
        wait_for(lambda: tenant.info().state == "idle")
        assert client.status(check=True).integrity == []
        assert daemon.memfds() == 0
