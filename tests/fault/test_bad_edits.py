"""Hostile edits and captures: at worst the client that sends them gets an error.

A bystander streams during every case, and at the end the daemon has in use what it had before the first. A refused
request leaves its session as it was: the same tokens come as without it.
"""

from __future__ import annotations

import contextlib
import math
import os
import struct
import threading
from array import array
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

import djinn_client as djinn
from djinn_client.protocol import (
    AddEdit,
    Cancel,
    CloseSession,
    Done,
    EndEdits,
    Failure,
    Generate,
    Generated,
    ListEdits,
    Request,
)
from tests.conftest import MODEL, DaemonStarter
from tests.support.bystander import Bystander
from tests.support.daemon import Daemon, holdings, wait_for
from tests.support.other_user import as_user, only_root, open_to_all
from tests.support.parameters import long_except
from tests.support.served import Wire
from tests.support.steered import Steered

PROMPT = [5, 6, 7, 8]
POINT = "blocks.1"
EDITS, EDIT_BYTES = 200, 1 << 20
WIDTH = 192  # of djinn-tiny


def floats(*values: float) -> bytes:
    return array("f", values).tobytes()


ONES = floats(*[1.0] * WIDTH)


@pytest.fixture(scope="module")
def target() -> Iterator[Daemon]:
    limits = {"edits_per_session": EDITS, "edits_per_position": EDITS, "edit_bytes_per_session": EDIT_BYTES}
    with DaemonStarter() as start:
        daemon = start({"limits": limits | {"window_bytes_per_user": "4GiB"}})
        with daemon.client() as client:
            client.load(MODEL, kv_bytes=64 << 20)
        with Bystander(daemon.address), Tenant(daemon.address) as tenant:
            tenant.capture(PROMPT, [POINT])
            assert tenant.close() == Done(id=9)
        before = holdings(daemon)
        yield daemon
        wait_for(lambda: holdings(daemon) == before)
        assert before["findings"] == []


class Tenant(Steered):
    def __init__(self, address: str) -> None:
        super().__init__(address, values=ONES)

    def capture(self, prompt: list[int], names: list[str], count: int = 0) -> Any:
        """Sends a call that captures, and returns the final reply."""
        reply = self.ask(Generate(id=8, session=self.session, token_ids=prompt, max_tokens=count, capture=names))
        if isinstance(reply, Generated) and reply.captured is not None:
            os.close(self.take_fd())
        return reply

    def close(self) -> Any:
        return self.ask(CloseSession(id=9, session=self.session))


@pytest.fixture
def tenant(target: Daemon) -> Iterator[Tenant]:
    """A tenant, while the daemon serves a bystander."""
    with Bystander(target.address), Tenant(target.address) as tenant:
        yield tenant
        assert tenant.close() == Done(id=9)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"points": []}, "name the points"),
    ({"points": ["blocks.99"]}, "has no point 'blocks.99'"),
    ({"points": ["blocks.-1"]}, "has no point"),
    ({"points": ["blocks.*.*"]}, "has two stars"),
    ({"points": ["\x00" * 4]}, "has no point"),
    ({"points": ["(a+)+" * 40 + "$"]}, "has no point"),
    ({"points": ["b" * 1000]}, "1,000 characters"),
    ({"points": ["b" * (1 << 20)]}, "a value has 1,048,576 bytes"),
    ({"points": [f"blocks.{n}" for n in range(20_000)]}, "20,000 points are too many"),
    ({"points": [f"blocks.{n}" for n in range(100_000)]}, "more than 33,792 values"),
    ({"points": [POINT, "logits"]}, "an edit has points of one width"),
    ({"points": ["logits"]}, "the values are [1, 192], and logits is 2,048 wide"),
    ({"values": ONES[:-1]}, "the values are 767 bytes, and blocks.3 is 192 wide: give [1, 192] in float32"),
    ({"values": ONES * 2}, "the values are [1, 384]"),
    ({"values": b""}, "the values are [1, 0]"),
    ({"values": ONES, "dtype": "float16"}, "the values are [1, 384], and"),
    ({"rows": 1 << 62}, "it must be 1"),
    ({"rows": -1}, "it must be 1"),
    ({"op": "scale"}, "scale has no values"),
    ({"values": ONES[:-4] + floats(math.nan)}, "a NaN or an infinity at index 191"),
    ({"values": ONES[:-4] + floats(-math.inf)}, "at index 191"),
    ({"values": struct.pack(f"<{WIDTH}e", *[math.inf] * WIDTH), "dtype": "float16"}, "at index 0"),
    ({"values": b"\x80\x7f" * WIDTH, "dtype": "bfloat16"}, "add needs finite numbers; replace takes any"),
    ({"scale": math.nan}, "scale is nan"),
    ({"scale": 1e300}, "scale is 1e+300"),
    ({"op": "project_out", "values": bytes(4 * WIDTH)}, "has a direction"),
    ({"op": "clamp", "low": 0.0, "values": floats(*[1e-30] * WIDTH)}, "has a direction"),
    ({"op": "clamp"}, "clamp needs low, high or both"),
    ({"op": "clamp", "low": 1.0, "high": -1.0}, "low must not be above high"),
    ({"op": "clamp", "low": math.nan}, "low is nan"),
    ({"positions": []}, "positions is empty"),
    ({"positions": [2, 1]}, "positions ascend"),
    ({"positions": [1, 1]}, "positions ascend"),
    ({"positions": [-1]}, "position -1 is negative"),
    ({"positions": [1 << 40]}, "never comes"),
    ({"positions": list(range(30_000))}, "never comes"),
    ({"positions": list(range(500_000))}, "more than 33,792 values"),
    ({"positions": [0, 1, 2], "rows": 2, "values": ONES * 2}, "1, or 3, one for each position"),
    ({"op": "erase"}, "op"),
    ({"dtype": "float64"}, "dtype"),
    ({"values": "text"}, "values"),
]


def test_invalid_edits_are_refused(tenant: Tenant) -> None:
    expected = tenant.generate(4, PROMPT)
    tenant.cut(0)
    for fields, words in REFUSED:
        reply = tenant.add(**fields)
        assert isinstance(reply, Failure), fields
        assert (reply.id, reply.code) == (3, "invalid_request")
        assert words in reply.message and len(reply.message) < 1000
        assert tenant.spans() == {}
    assert tenant.generate(4, PROMPT) == expected


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_no_number_harms_only_its_session(target: Daemon, tenant: Tenant, value: float) -> None:
    """The call that meets the value says so. Another call from the same hit is not affected."""
    prompt = PROMPT * 20
    with djinn.Session(MODEL, address=target.address) as s, s.fork() as other:
        expected = other.generate(prompt, max_tokens=4, ignore_eos=True).token_ids
        s.breakpoint(POINT, when="prefill")
        hit = s.run(prompt)
        assert isinstance(hit, djinn.Hit)
        what_came = hit.activation.clone()
        hit.activation[:, 7] = value
        out = s.resume(max_tokens=4)
        assert isinstance(out, djinn.Generated)
        assert (out.finish_reason, out.token_ids, out.text) == ("not_finite", [], "")
        assert s.token_ids() == prompt and other.token_ids() == prompt + expected
        hit.activation[:] = what_came
        again = s.resume_from(hit, max_tokens=4, ignore_eos=True)
        assert isinstance(again, djinn.Generated) and again.token_ids == expected
        with other.fork() as third:
            third.steer("blocks.0", op="scale", scale=1e38)
            third.steer("blocks.1", op="scale", scale=1e38)
            overflown = third.generate(PROMPT, max_tokens=4)
            assert (overflown.finish_reason, overflown.token_ids) == ("not_finite", [])


@pytest.mark.smoke
@pytest.mark.parametrize("edit", long_except(("overflow",), ("NaN", "overflow", "at every block")))
def test_positions_before_an_edit_are_not_affected(target: Daemon, edit: str) -> None:
    """Neither are earlier positions of the same prompt, nor their pages, which other sessions find. If a later position
    holds NaN, attention multiplies it by weights of 0."""
    with djinn.Client(target.address) as client:
        (model,) = [each for each in client.status().models if each.name == MODEL]
    prompt, at = [n % 200 + 9 for n in range(model.page_size + 10)], model.page_size + 5
    with djinn.Session(MODEL, address=target.address) as s:
        whole = s.capture("blocks.*").run(prompt[:at])["blocks.7"]
        expected = s.generate(prompt[at:], max_tokens=4, ignore_eos=True).token_ids
        s.truncate(0)
    with djinn.Session(MODEL, address=target.address) as s:
        if edit == "NaN":
            s.steer("blocks.0", [math.nan] * WIDTH, op="replace", positions=[at])
        elif edit == "overflow":
            s.steer(["blocks.0", "blocks.1"], op="scale", scale=1e38, positions=[at])
        else:
            for number in range(14):
                s.steer(f"blocks.{number // 2}", op="scale", scale=1000.0, positions=[at])
        cache = s.capture(["blocks.*", "logits"]).run(prompt, max_tokens=4)
        assert cache.generated.finish_reason == "not_finite"
        are_finite = cache["blocks.7"].isfinite().all(-1)[0].tolist()
        assert are_finite == [True] * at + [False] * (len(prompt) - at)
        assert (cache["blocks.7"][:, :at] - whole).abs().max() < 1e-3
        with djinn.Session(MODEL, address=target.address) as other:
            assert other.generate(prompt, max_tokens=4, ignore_eos=True).token_ids == expected
        s.unsteer()
        s.truncate(at)
        assert s.generate(prompt[at:], max_tokens=4, ignore_eos=True).token_ids == expected


def test_a_capture_has_the_generated_token_that_no_token_could_follow(target: Daemon) -> None:
    with djinn.Session(MODEL, address=target.address) as s:
        s.steer("blocks.0", [math.nan] * WIDTH, op="replace", positions=[22])
        cache = s.capture(["blocks.0", "logits"]).run(PROMPT * 5, max_tokens=8, ignore_eos=True)
        assert cache.generated.finish_reason == "not_finite" and len(cache.generated.token_ids) == 3
        assert cache.positions == range(23) and len(s.token_ids()) == 23
        assert cache["logits"].isfinite().all(-1)[0].tolist() == [True] * 22 + [False]


def test_no_session_finds_a_nan_in_reused_pages(target: Daemon) -> None:
    """Pages that held NaN are given to other sessions of the same user, which fill them in part."""
    with djinn.Client(target.address) as client:
        (model,) = [each for each in client.status().models if each.name == MODEL]
    size, prompts = model.page_size, [[n % 200 + 5] * (model.page_size // 2 + n) for n in range(model.pages // 2)]

    def open_all(stack: contextlib.ExitStack) -> list[djinn.Session]:
        return [stack.enter_context(djinn.Session(MODEL, address=target.address)) for _ in prompts]

    def generated() -> list[list[int]]:
        with contextlib.ExitStack() as stack:
            sessions = open_all(stack)
            return [s.generate(p, max_tokens=4).token_ids for s, p in zip(sessions, prompts, strict=True)]

    expected = generated()
    with contextlib.ExitStack() as stack:
        for number, s in enumerate(open_all(stack)):
            s.steer(POINT, [math.nan] * WIDTH, op="replace")
            assert s.generate([number % 200 + 5] * (2 * size - 2), max_tokens=4).finish_reason == "not_finite"
    assert generated() == expected


@pytest.mark.smoke
def test_ten_thousand_edits_are_refused_at_the_limit(tenant: Tenant) -> None:
    given = [tenant.add(op="scale", rows=0, values=b"", scale=1.0) for _ in range(EDITS)]
    assert given == list(range(1, EDITS + 1))
    for _ in range(10_000 // EDITS):
        reply = tenant.add()
        assert isinstance(reply, Failure)
        assert (reply.code, reply.data["limit"]) == ("quota_exceeded", EDITS)
    assert len(tenant.generate(4, PROMPT)) == 4


def test_edits_that_are_too_large(tenant: Tenant) -> None:
    """Each has values of 288 KiB and one span; a mebibyte has room for three."""
    wide: dict[str, Any] = {"positions": list(range(384)), "rows": 384, "values": ONES * 384}
    assert [tenant.add(**wide) for _ in range(3)] == [1, 2, 3]
    reply = tenant.add(**wide)
    assert isinstance(reply, Failure)
    assert reply.code == "quota_exceeded" and "limits.edit_bytes_per_session is 1,048,576" in reply.message
    scattered = list(range(0, 2000, 2))
    assert tenant.add(positions=scattered) == 4
    reply = tenant.add(positions=scattered)
    assert isinstance(reply, Failure) and reply.code == "quota_exceeded", "positions take room too"
    assert list(tenant.spans()) == [1, 2, 3, 4]


def test_edits_that_never_existed_cannot_be_ended(tenant: Tenant) -> None:
    for numbers, words in (
        ([1], "has no edit"),
        ([0], "has no edit"),
        ([-1], "has no edit"),
        ([1 << 62], "has no edit"),
        (list(range(1000)), "has no edit"),
        (list(range(100_000)), "more than 33,792 values"),
    ):
        reply = tenant.end(*numbers)
        assert isinstance(reply, Failure)
        assert reply.code == "invalid_request" and words in reply.message


def test_invalid_captures_are_refused(tenant: Tenant) -> None:
    for names, count, words in (
        (["blocks.99"], 1, "has no point 'blocks.99'"),
        (["blocks.*", "blocks.*.*"], 1, "has two stars"),
        (["b" * (1 << 20)], 1, "a value has 1,048,576 bytes"),
        ([f"blocks.{n}" for n in range(20_000)], 1, "20,000 points are too many"),
        ([f"blocks.{n}" for n in range(100_000)], 1, "more than 33,792 values"),
        ([POINT], -1, "max_tokens is -1; it must be from 0 to 2147483647"),
    ):
        reply = tenant.capture(PROMPT, names, count)
        assert isinstance(reply, Failure)
        assert reply.code == "invalid_request" and words in reply.message
    empty = tenant.capture([], [POINT])
    assert isinstance(empty, Failure) and "the session is empty" in empty.message
    assert len(tenant.generate(4, PROMPT)) == 4


def requests_for(session: str) -> list[Request]:
    return [
        AddEdit(id=7, session=session, points=[POINT], rows=1, values=ONES),
        EndEdits(id=7, session=session),
        EndEdits(id=7, session=session, edits=[1]),
        ListEdits(id=7, session=session),
        Generate(id=7, session=session, max_tokens=0, capture=[POINT]),
    ]


@only_root
def test_another_user_s_session(target: Daemon, tenant: Tenant) -> None:
    """The errors are the same as for an unknown session."""
    open_to_all(target.folder, target.address)
    assert tenant.add() == 1
    before = tenant.edits()
    with contextlib.ExitStack() as stack:
        with as_user():
            stranger = stack.enter_context(Wire(target.address))
        for mine, nobody_s in zip(requests_for(tenant.session), requests_for("0123456789abcdef"), strict=True):
            told, unknown = stranger.ask(mine), stranger.ask(nobody_s)
            assert isinstance(told, Failure) and isinstance(unknown, Failure)
            assert told.code == unknown.code == "session_not_found"
            assert told.message.replace(tenant.session, "0123456789abcdef") == unknown.message
    assert tenant.edits() == before


@pytest.mark.smoke
def test_a_cancelled_or_disconnected_capture_leaves_nothing(target: Daemon, tenant: Tenant) -> None:
    """The fixture checks the daemon's memory and descriptors."""
    request = Generate(
        id=3, session=tenant.session, token_ids=PROMPT, max_tokens=1500, ignore_eos=True, capture=["blocks.*"]
    )
    tenant.send(request, Cancel(target=3))
    reply = tenant.reply()
    assert isinstance(reply, Failure | Generated)
    if isinstance(reply, Generated):
        assert (reply.finish_reason, reply.captured) == ("cancelled", None)
    for _ in range(3):
        with Tenant(target.address) as gone:
            gone.send(Generate(id=3, session=gone.session, token_ids=PROMPT, max_tokens=1500, capture=["blocks.*"]))
        with djinn.Client(target.address) as client:
            client.close_session(gone.session)
    assert len(tenant.generate(4, PROMPT)) == 4


def test_a_session_is_closed_by_another_client_during_a_capture(target: Daemon) -> None:
    with djinn.Session(MODEL, address=target.address) as s, djinn.Client(target.address) as other:

        def close() -> None:
            wait_for(lambda: other.status().requests_running)
            other.close_session(s.id)

        closing = threading.Thread(target=close)
        closing.start()
        with pytest.raises(djinn.Cancelled, match="nothing was captured"):
            s.capture("blocks.*").run(PROMPT, max_tokens=1500, ignore_eos=True)
        closing.join()


def test_captures_that_exceed_the_device_s_memory(target: Daemon, tenant: Tenant) -> None:
    """Many captures at once: some get an error, and the others succeed."""
    request = Generate(id=8, session="", token_ids=PROMPT, max_tokens=1800, ignore_eos=True, capture=["logits"])
    with contextlib.ExitStack() as stack:
        tenants = [stack.enter_context(Tenant(target.address)) for _ in range(40)]
        for each in tenants:
            each.send(msgspec.structs.replace(request, session=each.session))
        wait_for(lambda: target.device().used_bytes > 600 << 20)
        for each in tenants:
            each.send(Cancel(target=8))
        replies = [each.reply() for each in tenants]
        refused = [reply for reply in replies if isinstance(reply, Failure)]
        assert 0 < len(refused) < len(tenants), replies
        for reply in refused:
            assert reply.code == "out_of_memory" and reply.data["needed"] > reply.data["free"]
            assert "ask for fewer positions or points, or wait" in reply.message
        assert all(each.close() == Done(id=9) for each in tenants)
    assert len(tenant.generate(4, PROMPT)) == 4
