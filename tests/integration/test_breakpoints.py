"""Sessions that stop inside a model, are inspected, edited, and continue, among other sessions in the batch. Without an
edit their tokens stay the same. With one they are those of the same change by a hook in transformers."""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support import ops, reference
from tests.support.daemon import Daemon, holdings, wait_for
from tests.support.edited import BLOCKS, WIDTH, assert_close, go_on, prompt_of, vector
from tests.support.models import reduced_model
from tests.support.parameters import long_except
from tests.support.torch_hooks import Change, Hooked
from tools.bench.harness.trace import traced
from tools.bench.whitebox.resume_inside import block_counts

FAMILIES = ("gpt2", "gemma-2")  # unit/engine/test_breakpoints.py stops each at each boundary
STREAMED = "mixtral"
NEW = 5  # tokens generated per call
AT = ("hook_embed", *(f"blocks.{block}.hook_resid_post" for block in range(BLOCKS)))  # between any two blocks


@pytest.fixture(scope="module")
def roomy_daemon() -> Iterator[Daemon]:
    """A daemon with one model that has most blocks streamed."""
    models = {"streamed": {"path": str(reduced_model(STREAMED)), "resident": 1}}
    with DaemonStarter() as start:
        yield start({"models": models})


def expect_hit(told: djinn.Hit | djinn.Generated | None) -> djinn.Hit:
    assert isinstance(told, djinn.Hit), told
    return told


def expect_end(told: djinn.Hit | djinn.Generated | None) -> list[int]:
    assert isinstance(told, djinn.Generated), told
    return told.token_ids


async def debugged(
    model: str,
    address: str,
    prompt: list[int],
    change: Callable[[djinn.Hit], None] = lambda hit: None,
    count: int = NEW,
    **breakpoint: Any,
) -> tuple[list[int], list[djinn.Hit]]:
    """Runs a session from hit to hit. Returns its tokens and its hits."""
    hits, tokens = [], []
    async with djinn.AsyncSession(model, address=address) as s:
        await s.breakpoint(**breakpoint)
        told: djinn.Hit | djinn.Generated | None = await s.run(prompt, max_tokens=count, ignore_eos=True)
        while isinstance(told, djinn.Hit):
            hits.append(told)
            tokens += told.generated.token_ids
            change(told)
            told = await s.resume(max_tokens=count - len(tokens), ignore_eos=True)
    return tokens + expect_end(told), hits


# --- untouched ------------------------------------------------------------------------------------------------------


def check_untouched(folder: Path, model: str, address: str) -> None:
    """Stops at all boundaries at once, among sessions without breakpoints."""
    prompts = {point: prompt_of(length, 60 + length) for point, length in zip(AT, (270, 7, 33, 1, 64), strict=True)}
    others = [prompt_of(length, 90) for length in (5, 258)]

    async def bystander(prompt: list[int]) -> list[int]:
        async with djinn.AsyncSession(model, address=address) as s:
            return (await s.generate(prompt, max_tokens=3 * NEW, ignore_eos=True)).token_ids

    async def together() -> Any:
        return await asyncio.gather(
            asyncio.gather(
                *(debugged(model, address, prompt, point=point, when="every") for point, prompt in prompts.items())
            ),
            asyncio.gather(*(bystander(prompt) for prompt in others)),
        )

    told, beside = asyncio.run(together())
    for prompt, tokens in zip(others, beside, strict=True):
        assert tokens == reference.greedy(folder, prompt, 3 * NEW, tokens), f"a bystander of {len(prompt)} tokens"
    hooked = Hooked(folder)
    for (point, prompt), (tokens, hits) in zip(prompts.items(), told, strict=True):
        assert tokens == reference.greedy(folder, prompt, NEW, tokens), point
        length = len(prompt)
        assert [hit.positions for hit in hits] == [
            range(length),
            *(range(position, position + 1) for position in range(length, length + NEW - 1)),
        ]
        seen = hooked.run([*prompt, *tokens[:-1]], wanted=[point])[1][point]
        assert_close(torch.cat([hit.activation[0] for hit in hits]), seen, point)


def test_logprobs_are_the_same_bit_for_bit(llama: Path, roomy_daemon: Daemon) -> None:
    """The session is alone, so that the shapes of the batches are the same."""
    prompt = prompt_of(40, 7)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        expected = s.generate(prompt, max_tokens=NEW, ignore_eos=True, logprobs=5).logprobs
    for point in AT[::2]:
        found = []
        with djinn.Session(str(llama), address=roomy_daemon.address) as s:
            s.breakpoint(point, when="every")
            told: djinn.Hit | djinn.Generated | None = s.run(prompt, max_tokens=NEW, ignore_eos=True, logprobs=5)
            while isinstance(told, djinn.Hit):
                found += told.generated.logprobs
                told = s.resume(max_tokens=NEW - len(found), ignore_eos=True, logprobs=5)
            assert isinstance(told, djinn.Generated)
        assert found + told.logprobs == expected, point


# --- edited ---------------------------------------------------------------------------------------------------------


def check_edited(folder: Path, model: str, address: str) -> None:
    """Edits at hits, at all positions, at the prompt's last one, and at some, in a batch with other sessions."""
    rows = vector(5, 3, WIDTH)

    def all_of_it(hit: djinn.Hit) -> None:
        hit.activation *= 0.5

    def the_last(hit: djinn.Hit) -> None:
        hit.activation[:, -1] *= -1.5

    def some(hit: djinn.Hit) -> None:
        hit.activation = hit.activation.clone()
        hit.activation[0, 3:6] = rows

    cases: dict[str, tuple[Any, dict[str, Any], Change]] = {}
    for block, point in enumerate(AT):
        length = 20 + block
        kinds = {
            "all": (all_of_it, {"point": point, "when": "every"}, Change(point, ops.scale(0.5))),
            "the last": (
                the_last,
                {"point": point, "when": "prefill"},
                Change(point, ops.scale(-1.5), positions=[length - 1]),
            ),
            "some": (
                some,
                {"point": point, "when": "prefill"},
                Change(point, ops.replace(rows), positions=[3, 4, 5]),
            ),
        }
        kind = list(kinds)[block % 3]
        cases[f"{kind} at {point}"] = kinds[kind]
    prompts = {name: prompt_of(20 + index, 30 + index) for index, name in enumerate(cases)}

    async def together() -> list[tuple[list[int], list[djinn.Hit]]]:
        return await asyncio.gather(
            *(debugged(model, address, prompts[name], act, **where) for name, (act, where, _) in cases.items())
        )

    hooked = Hooked(folder)
    for (name, (_, _, change)), (tokens, _) in zip(cases.items(), asyncio.run(together()), strict=True):
        assert tokens == hooked.greedy(prompts[name], NEW, [change]), name


@pytest.mark.parametrize("family", FAMILIES, indirect=True)
def test_hits_without_and_with_edits(family: Path, roomy_daemon: Daemon) -> None:
    check_untouched(family, str(family), roomy_daemon.address)
    check_edited(family, str(family), roomy_daemon.address)


def test_hits_on_streamed_weights(roomy_daemon: Daemon) -> None:
    with roomy_daemon.client() as client:
        assert client.load("streamed").blocks_streamed == BLOCKS - 1
        check_untouched(reduced_model(STREAMED), "streamed", roomy_daemon.address)
        check_edited(reduced_model(STREAMED), "streamed", roomy_daemon.address)
        client.unload("streamed")


def test_a_replacement_beside_steering(llama: Path, roomy_daemon: Daemon) -> None:
    """The hit shows the steered activation, and the replacement applies after the steering."""
    prompt, v, rows = prompt_of(30, 8), vector(3), vector(4, 30, WIDTH)
    steered = Change(AT[2], ops.add(v))
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        s.steer("blocks.1", v)
        s.breakpoint(layer=1, when="prefill")
        hit = expect_hit(s.run(prompt, max_tokens=NEW, ignore_eos=True))
        assert (hit.layer, hit.point, hit.positions) == (1, "blocks.1.hook_resid_post", range(30))
        assert_close(hit.activation[0], Hooked(llama).run(prompt, [steered], [AT[2]])[1][AT[2]], "steered")
        told = expect_end(s.resume(rows, max_tokens=NEW, ignore_eos=True))
        put = Change(AT[2], ops.replace(rows), positions=range(30))
        assert told == Hooked(llama).greedy(prompt, NEW, [steered, put])


def test_edits_from_one_block_to_the_next(llama: Path, roomy_daemon: Daemon) -> None:
    """Several breakpoints, each with an edit; every second generated position; streams."""
    prompt = prompt_of(20, 9)
    changes = [
        Change(AT[1], ops.scale(0.5), positions=range(20)),
        Change(AT[3], ops.scale(2.0), positions=range(20)),
        Change(AT[4], ops.scale(-1.0), positions=[21, 23, 25]),
    ]
    tokens: list[int] = []
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        s.breakpoint(layer=2, when="prefill")
        s.breakpoint(layer=0, when="prefill")
        s.breakpoint(layer=3, when="decode", every=2)
        seen = []
        stream = s.stream(prompt, max_tokens=7, ignore_eos=True)
        tokens += [token for piece in stream for token in piece.token_ids]
        told: djinn.Hit | djinn.Generated | None = stream.hit
        while isinstance(told, djinn.Hit):
            seen.append((told.layer, told.positions))
            told.activation *= {0: 0.5, 2: 2.0, 3: -1.0}[expect_hit(told).layer or 0]
            told = s.resume(max_tokens=7 - len(tokens), ignore_eos=True)
            tokens += (told.generated if isinstance(told, djinn.Hit) else told or stream.result).token_ids
    assert seen == [(0, range(20)), (2, range(20)), (3, range(21, 22)), (3, range(23, 24)), (3, range(25, 26))]
    assert tokens == Hooked(llama).greedy(prompt, 7, changes)


# --- a hit is a resume point ----------------------------------------------------------------------------------------


def test_a_hit_can_be_used_repeatedly_and_on_forks(llama: Path, roomy_daemon: Daemon) -> None:
    prompt, hooked = prompt_of(270, 10), Hooked(llama)
    plain = hooked.greedy(prompt, NEW)

    def scaled(by: float) -> list[int]:
        return hooked.greedy(prompt, NEW, [Change(AT[2], ops.scale(by), positions=[269])])

    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        s.breakpoint(layer=1, when="prefill")
        hit = expect_hit(s.run(prompt, max_tokens=NEW, ignore_eos=True))
        original = hit.activation.clone()
        with s.fork() as early:
            assert expect_end(s.resume(max_tokens=NEW, ignore_eos=True)) == plain
            for by in (0.5, -1.0, 2.0):
                hit.activation[:, -1] = original[:, -1] * by
                assert expect_end(s.resume_from(hit, max_tokens=NEW, ignore_eos=True)) == scaled(by)
            assert expect_end(s.resume_from(hit, original, max_tokens=NEW, ignore_eos=True)) == plain
            assert len(s.edits()) == 1, "each edit must replace the one before"
            with s.fork() as late:
                assert expect_end(late.resume_from(hit, max_tokens=NEW, ignore_eos=True)) == scaled(2.0)
            assert expect_end(early.resume_from(hit, max_tokens=NEW, ignore_eos=True)) == scaled(2.0)
            assert expect_hit(early.run(prompt[:9])).positions == range(270 + NEW, 279 + NEW)


def test_a_captured_call_leaves_a_resume_point_behind_each_block(llama: Path, roomy_daemon: Daemon) -> None:
    """A later call goes back to each block, without or with an edit, to the prompt's end or further."""
    prompt, hooked = prompt_of(40, 17), Hooked(llama)
    plain = hooked.greedy(prompt, NEW)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        cache = s.capture("blocks.*.hook_resid_post").run(prompt, max_tokens=NEW, ignore_eos=True)
        assert cache.generated.token_ids == plain
        with s.fork() as t:
            assert expect_end(t.resume_from(cache.resume_point("blocks.2", 42), max_tokens=NEW, ignore_eos=True)) == (
                hooked.greedy([*prompt, *plain[:2]], NEW)
            )
        for layer in (0, 3):
            point = cache.resume_point(f"blocks.{layer}")
            assert (point.layer, point.positions) == (layer, range(40))
            with s.fork() as t:
                assert expect_end(t.resume_from(point, max_tokens=NEW, ignore_eos=True)) == plain
                point.activation[:, -1] *= -1
                told = expect_end(t.resume_from(point, max_tokens=NEW, ignore_eos=True))
            assert told == hooked.greedy(prompt, NEW, [Change(AT[layer + 1], ops.scale(-1.0), positions=[39])])


def test_a_call_that_captures_runs_past_breakpoints(llama: Path, roomy_daemon: Daemon) -> None:
    """The session may be at a hit, which the call ends: the hit's positions are captured too."""
    prompt, more = prompt_of(20, 18), prompt_of(7, 19)
    points = ["blocks.*.hook_resid_post", "logits"]
    with (
        djinn.Session(str(llama), address=roomy_daemon.address) as s,
        djinn.Session(str(llama), address=roomy_daemon.address) as plain,
    ):
        s.breakpoint(layer=1)
        hit = expect_hit(s.run(prompt))
        seen, expected = (each.capture(points) for each in (s, plain))
        cache, whole = seen.run(more, max_tokens=3, ignore_eos=True), expected.run([*prompt, *more], max_tokens=3)
        assert cache.generated.token_ids == whole.generated.token_ids
        assert cache.positions == whole.positions == range(29)
        for name, rows in whole.items():
            torch.testing.assert_close(cache[name], rows, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(cache["blocks.1"][:, :20], hit.activation, atol=1e-5, rtol=1e-5)
        assert expect_hit(s.run(more)).positions == range(30, 37), "the breakpoint must still exist"
        s.intervene("blocks.2", lambda activation, context: None, local=True)
        with pytest.raises(djinn.InvalidRequest, match="remove them first"):
            seen.run(more)


def test_patching_from_a_hit(llama: Path, roomy_daemon: Daemon) -> None:
    clean, corrupt = prompt_of(20, 11), prompt_of(20, 12)
    with (
        djinn.Session(str(llama), address=roomy_daemon.address) as s,
        djinn.Session(str(llama), address=roomy_daemon.address) as t,
    ):
        s.breakpoint(layer=0)
        hit = expect_hit(s.run(clean))
        t.patch(hit.activation, positions=[5, 6])
        rows = hit.activation[0, 5:7].clone()
        expected = Hooked(llama).greedy(corrupt, NEW, [Change(AT[1], ops.replace(rows), positions=[5, 6])])
        assert go_on(t, corrupt, NEW) == expected


# --- refusals and losses ---------------------------------------------------------------------------------------------


def test_a_refused_request_leaves_the_session_at_its_hit(llama: Path, roomy_daemon: Daemon) -> None:
    prompt = prompt_of(20, 13)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        breakpoint = s.breakpoint(layer=1)
        hit = expect_hit(s.run(prompt))
        for words, act in (
            (r"\[1, 19, 64\]", lambda: s.resume(hit.activation[:, 1:])),
            ("float64", lambda: s.resume(hit.activation.double())),
            ("max_tokens", lambda: s.resume(max_tokens=-1)),
            ("the nearest is blocks.1.hook_resid_post", lambda: s.breakpoint("blocks.1.mlp.hook_out")),
        ):
            with pytest.raises(djinn.InvalidRequest, match=words):
                act()
            assert s.edits() == [] and djinn.sessions(address=roomy_daemon.address)[0].state == "stopped"
        breakpoint.remove()
        assert expect_end(s.resume(max_tokens=NEW, ignore_eos=True)) == reference.greedy(llama, prompt, NEW)
        for options in ({}, {"max_tokens": NEW}):
            with pytest.raises(djinn.SessionStateError, match="at no breakpoint"):
                s.resume(**options)  # type: ignore[arg-type]
        s.unpause()  # of a session that is not paused


@pytest.mark.long
def test_ten_thousand_breakpoints_are_refused_at_the_limit(llama: Path, roomy_daemon: Daemon) -> None:
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        for first in range(5):
            s.breakpoint(layer=1, positions=range(first, 400, 2))
        for _ in range(2):
            with pytest.raises(djinn.QuotaExceeded, match=r"limits\.breakpoints_per_session is 1,000"):
                s.breakpoint(layer=1, positions=range(0, 400, 2))
        s.breakpoint(layer=1, positions=[0, 2, 4, 6])
        with pytest.raises(djinn.QuotaExceeded):
            s.breakpoint(layer=1)
        assert len(s.breakpoints()) == 6
        assert expect_hit(s.run(prompt_of(5, 1))).breakpoint == 1


def test_a_session_with_kv_of_its_client_can_stop_behind_it(llama: Path, roomy_daemon: Daemon) -> None:
    """Positions that stop lie behind the client's KV and may be edited."""
    prompt, address = prompt_of(300, 18), roomy_daemon.address
    with djinn.Session(str(llama), address=address) as s:
        s.generate(prompt[:280], max_tokens=1)
        s.truncate(280)
        kv = s.kv()
    with djinn.Session.from_kv(str(llama), prompt[:280], kv, address=address) as s:
        s.breakpoint(layer=1, when="prefill")
        hit = expect_hit(s.run(prompt[280:]))
        assert hit.positions == range(280, 300)
        hit.activation[:, 5:] *= 0.5
        told = expect_end(s.resume(max_tokens=NEW, ignore_eos=True))
        change = Change(AT[2], ops.scale(0.5), positions=range(285, 300))
        assert told == Hooked(llama).greedy(prompt, NEW, [change])


def test_a_hit_outlives_its_client_and_a_paused_one_continues(llama: Path, roomy_daemon: Daemon) -> None:
    prompt = prompt_of(270, 14)
    expected = reference.greedy(llama, prompt, NEW)
    s = djinn.Session(str(llama), address=roomy_daemon.address)
    s.breakpoint(layer=1, when="prefill")
    positions = expect_hit(s.run(prompt)).positions
    s.pause()
    s.detach()
    with djinn.Session.attach(s.id, address=roomy_daemon.address) as again:
        assert again.info.hit is not None and range(again.info.hit.first, again.info.hit.end) == positions
        assert expect_end(again.resume(max_tokens=NEW, ignore_eos=True)) == expected


@pytest.mark.parametrize("tier", long_except(("disk",), ("host", "disk")))
def test_a_hit_that_has_left_the_device_continues_where_it_stopped(
    llama: Path, roomy_daemon: Daemon, tier: Literal["host", "disk"]
) -> None:
    prompt, address = prompt_of(300, 19), roomy_daemon.address
    with djinn.Session(str(llama), address=address) as s:
        said = s.generate(prompt[:100], max_tokens=1, ignore_eos=True).token_ids
        s.breakpoint(layer=1, when="prefill")
        hit = expect_hit(s.run(prompt[100:], max_tokens=NEW))
        assert s.pause(tier).pages > 0 and s.info.pages == 0
        hit.activation[:, -50:] *= 0.5
        with traced(address, 2.0) as spans:
            told = expect_end(s.resume(max_tokens=NEW, ignore_eos=True))
            counts = block_counts(spans(), BLOCKS)
        tokens = prompt[:100] + said + prompt[100:]
        change = Change(AT[2], ops.scale(0.5), positions=range(len(tokens) - 50, len(tokens)))
        assert told == Hooked(llama).greedy(tokens, NEW, [change])
        ran_before, ran_behind = set(counts[:2]), set(counts[2:])
        assert ran_before == {NEW - 1} and ran_behind == {NEW}, f"blocks were run {counts}"


def test_an_abandoned_hit_is_unmapped_while_the_next_call_runs(llama: Path, roomy_daemon: Daemon) -> None:
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        s.breakpoint("blocks.1.hook_resid_pre", when="prefill")
        hit = weakref.ref(expect_hit(s.run(prompt_of(4, 15), max_tokens=1)))
        expect_end(s.resume(max_tokens=1))
        assert hit() is not None
        s.generate(max_tokens=1)
        assert hit() is None


def test_hits_leave_nothing_behind(roomy_daemon: Daemon) -> None:
    """Neither device memory nor a window is left, also of clients that disconnect at a hit."""
    folder, prompt = reduced_model("llama-3.1"), prompt_of(300, 16)
    with roomy_daemon.client() as client:
        client.load(str(folder))
        wait_for(lambda: all(model.disk_pages for model in client.models() if model.state == "ready"))
    for _ in range(2):
        held = holdings(roomy_daemon)  # the first time creates objects that stay
        with djinn.Session(str(folder), address=roomy_daemon.address) as s:
            s.breakpoint(layer=1, when="every")
            hits = [expect_hit(s.run(prompt)), expect_hit(s.resume())]
        with djinn.Session(str(folder), address=roomy_daemon.address) as s:
            assert len(go_on(s, prompt, NEW)) == NEW
        assert hits[0].activation.shape == (1, 300, WIDTH)  # the window is the client's, and counts while it is kept
        del hits
    wait_for(lambda: holdings(roomy_daemon) == held)
    assert held["findings"] == []
    djinn.unload(str(folder), address=roomy_daemon.address)
