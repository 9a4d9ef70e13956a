"""Captures and edits inside a model equal those of PyTorch hooks in transformers, whatever else is in the batch.
test_whitebox_sessions.py tests edits during a session's life."""

from __future__ import annotations

import asyncio
import functools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support import reference
from tests.support.daemon import Daemon, holdings
from tests.support.edited import (
    BLOCKS,
    NEW,
    VOCABULARY,
    WIDTH,
    Case,
    assert_close,
    cases,
    go_on,
    prompt_of,
    vector,
)
from tests.support.models import reduced_model
from tests.support.parameters import long_except
from tests.support.torch_hooks import Hooked

# Attention beside the MLP, experts, norms behind both with capped logits, and an MLP of two products. All families are
# in tests/unit/model/test_probe.py.
THROUGH_A_DAEMON = ("gpt-j", "mixtral", "gemma-2", "opt")
EACH_FAMILY = pytest.mark.parametrize("family", long_except(("gemma-2",), THROUGH_A_DAEMON), indirect=True)
WITHIN = ("hook_resid_pre", "hook_attn_out", "hook_mlp_out", "hook_resid_post")
STREAMED = ("llama-3.1", "mixtral")
ENDLESS = 1700  # tokens: nearly the whole context, which takes seconds


@pytest.fixture(scope="module")
def roomy_daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon that has some models in other forms too: with most blocks streamed, and in bfloat16. The model in
    bfloat16 has a folder of its own, because one folder is one model."""
    models = {f"streamed {name}": {"path": str(reduced_model(name)), "resident": 1} for name in STREAMED}
    folder = shutil.copytree(reduced_model("llama-3.1"), tmp_path_factory.mktemp("half") / "llama")
    half = {"path": str(folder), "dtype": "bfloat16"}
    with DaemonStarter() as start:
        yield start({"models": models | {"half": half}})


# --- captures -------------------------------------------------------------------------------------------------------


@EACH_FAMILY
def test_captures_equal_what_hooks_see(family: Path, roomy_daemon: Daemon) -> None:
    """At every point, for a prompt longer than a page, and for generated tokens."""
    names = djinn.points(str(family), address=roomy_daemon.address)
    assert names == [
        "hook_embed",
        *(f"blocks.{block}.{point}" for block in range(BLOCKS) for point in WITHIN),
        "ln_final.hook_normalized",
        "logits",
    ]
    prompt = prompt_of(300, 1)
    with djinn.Session(str(family), address=roomy_daemon.address) as s:
        cache = s.capture(names).run(prompt, max_tokens=NEW, ignore_eos=True)
        tokens = s.token_ids()
        last = s.capture("blocks.*.hook_resid_post").run()
    assert tokens[300:] == cache.generated.token_ids == reference.greedy(family, prompt, NEW)
    assert cache.positions == range(300 + NEW - 1) and last.positions == range(300 + NEW - 1, 300 + NEW)
    seen = Hooked(family).run(tokens, wanted=names)[1]
    for name in names:
        found = cache.get(name)
        assert found is not None, name
        assert_close(found[0], seen[name][:-1], name)
    for name, found in last.items():
        assert_close(found[0], seen[name][-1:], name)


def test_names_of_modules_are_names_of_points(llama: Path, roomy_daemon: Daemon) -> None:
    prompt = prompt_of(20, 2)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        cache = s.capture(["model.layers.*", "model.layers.2.mlp", "blocks.1.attn.hook_out", "lm_head"]).run(prompt)
    assert list(cache) == [
        *("model.layers.0", "blocks.1.attn.hook_out", "model.layers.1", "model.layers.2.mlp", "model.layers.2"),
        *("model.layers.3", "lm_head"),
    ]
    assert cache["blocks.3.hook_resid_pre"] is cache["model.layers.2"]
    seen = Hooked(llama).run(prompt, wanted=["blocks.2.hook_mlp_out", "logits"])[1]
    assert_close(cache["blocks.2.hook_mlp_out"][0], seen["blocks.2.hook_mlp_out"], "mlp")
    assert_close(cache["logits"][0], seen["logits"], "logits")
    assert cache.generated.token_ids == [] and cache.generated.usage.computed_tokens == 20


def test_captures_change_no_token_and_include_cached_positions(llama: Path, roomy_daemon: Daemon) -> None:
    """Calls with and without captures take turns."""
    prompt = prompt_of(280, 3)
    expected = reference.greedy(llama, prompt, 4 * NEW)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        told = []
        for call in range(4):
            text = prompt if call == 0 else None
            if call % 2:
                told += (
                    s.capture(["blocks.1.hook_mlp_out", "logits"])
                    .run(text, max_tokens=NEW, ignore_eos=True)
                    .generated.token_ids
                )
            else:
                told += s.generate(text, max_tokens=NEW, ignore_eos=True).token_ids
        assert told == expected
    with djinn.Session(str(llama), address=roomy_daemon.address) as again:  # its first page is cached
        cache = again.capture("logits").run(prompt)
        assert cache.positions == range(280) and cache["logits"].shape == (1, 280, VOCABULARY)
        assert again.generate(max_tokens=NEW, ignore_eos=True).token_ids == expected[:NEW]


@pytest.mark.long
def test_captures_leave_nothing_behind(roomy_daemon: Daemon) -> None:
    """Neither device memory nor a window is left, also of a capture that was cancelled."""
    folder, prompt = reduced_model("llama-3.1"), prompt_of(300, 4)

    async def give_up() -> None:
        async with djinn.AsyncSession(str(folder), address=roomy_daemon.address) as s:
            capture = asyncio.create_task(
                s.capture(["blocks.*", "logits"]).run(prompt, max_tokens=ENDLESS, ignore_eos=True)
            )
            while (await asyncio.to_thread(djinn.sessions, address=roomy_daemon.address))[0].tokens < 310:
                assert not capture.done()
            capture.cancel()
            with pytest.raises(asyncio.CancelledError):
                await capture
            await s.truncate(300)
            told = await s.generate(max_tokens=NEW, ignore_eos=True)
            assert told.token_ids == reference.greedy(folder, prompt, NEW)

    held = []
    for _ in range(2):  # the first time creates objects that stay
        with djinn.Session(str(folder), address=roomy_daemon.address) as s:
            cache = s.capture(["blocks.*", "logits"]).run(prompt)
        asyncio.run(give_up())
        assert cache["logits"].shape == (1, 300, VOCABULARY)  # the window is the client's, and counts while it is kept
        del cache
        held.append(holdings(roomy_daemon))
    assert held[0] == held[1]
    djinn.unload(str(folder), address=roomy_daemon.address)


# --- edits ----------------------------------------------------------------------------------------------------------


LENGTHS = (270, 7, 33, 1, 64, 256)  # of prompts; pages have 256 tokens


def check_cases(folder: Path, model: str, address: str) -> None:
    """Runs all cases at once, each with and without captures, among sessions without edits."""
    prompts = {name: prompt_of(LENGTHS[n % len(LENGTHS)] + 6, 40 + n) for n, name in enumerate(cases())}

    async def edited(name: str, case: Case) -> tuple[list[int], djinn.Cache]:
        async with djinn.AsyncSession(model, address=address) as s, djinn.AsyncSession(model, address=address) as t:
            for edit in case.edits:
                await s.steer(**edit)
                await t.steer(**edit)
            told, cache = await asyncio.gather(
                s.generate(prompts[name], max_tokens=NEW, ignore_eos=True),
                t.capture(["logits", "blocks.2.hook_attn_out", "blocks.3"]).run(
                    prompts[name], max_tokens=NEW, ignore_eos=True
                ),
            )
            return told.token_ids, cache

    async def bystander(prompt: list[int]) -> list[int]:
        async with djinn.AsyncSession(model, address=address) as s:
            return (await s.generate(prompt, max_tokens=4 * NEW, ignore_eos=True)).token_ids

    async def together() -> tuple[list[tuple[list[int], djinn.Cache]], list[list[int]]]:
        others = asyncio.gather(*(bystander(prompt_of(length, 90)) for length in LENGTHS))
        told = await asyncio.gather(*(edited(name, case) for name, case in cases().items()))
        return told, await others

    told, others = asyncio.run(together())
    for length, tokens in zip(LENGTHS, others, strict=True):
        expected = reference.greedy(folder, prompt_of(length, 90), 4 * NEW, tokens)
        assert tokens == expected, f"a bystander of {length} tokens"
    model_ = Hooked(folder)
    for (name, case), (tokens, cache) in zip(cases().items(), told, strict=True):
        prompt = prompts[name]
        assert tokens == cache.generated.token_ids == model_.greedy(prompt, NEW, case.changes), name
        ran, changes = [*prompt, *tokens[:-1]], case.changes
        wanted = ["logits", "blocks.2.hook_attn_out", "blocks.3.hook_resid_post"]
        for point, seen in model_.run(ran, changes, wanted)[1].items():
            rounding = functools.partial(model_.rounding, ran, changes, point)
            assert_close(cache[point][0], seen, f"{name} at {point}", rounding)


@EACH_FAMILY
def test_edited_sessions_give_the_tokens_of_hooks(family: Path, roomy_daemon: Daemon) -> None:
    check_cases(family, str(family), roomy_daemon.address)


@pytest.mark.parametrize("name", long_except(("llama-3.1",), STREAMED))
def test_edits_on_streamed_weights(roomy_daemon: Daemon, name: str) -> None:
    model = f"streamed {name}"
    with roomy_daemon.client() as client:
        assert client.load(model).blocks_streamed == BLOCKS - 1
        check_cases(reduced_model(name), model, roomy_daemon.address)
        client.unload(model)


def test_every_case_changes_the_logits() -> None:
    """If a case changed nothing, it would test nothing."""
    folder = reduced_model("llama-3.1")
    model = Hooked(folder)
    for name, case in cases().items():
        prompt = prompt_of(20, 11)
        assert not torch.allclose(model.run(prompt)[0][-1], model.run(prompt, case.changes)[0][-1], atol=1e-2), name


def test_bfloat16(roomy_daemon: Daemon) -> None:
    """Captured rows are the model's own bits: put back at their place they change nothing."""
    prompt = prompt_of(40, 18)
    with djinn.Session("half", address=roomy_daemon.address) as s:
        cache = s.capture(["blocks.*", "blocks.*.attn.hook_out", "logits"]).run(prompt)
        assert {tensor.dtype for tensor in cache.values()} == {torch.bfloat16}
        expected = go_on(s)
    with djinn.Session("half", address=roomy_daemon.address) as s:
        for tensor in cache.values():
            s.patch(tensor)
        again = s.capture(["blocks.*", "logits"]).run(prompt)
        for name, tensor in again.items():
            assert torch.equal(tensor, cache[name]), name
        assert go_on(s) == expected


# --- refusals -------------------------------------------------------------------------------------------------------


def test_refused_requests_leave_the_session_as_it_was(llama: Path, roomy_daemon: Daemon) -> None:
    prompt, v = prompt_of(20, 19), vector(21)
    with djinn.Session(str(llama), address=roomy_daemon.address) as s:
        for words, act in (
            ("did you mean", lambda: s.steer("blocks.1.hook_resid_pst", v)),
            ("4 blocks", lambda: s.steer("blocks.4", v)),
            ("64", lambda: s.steer("blocks.1", v[:-1])),
            ("512", lambda: s.steer("logits", v)),
            ("NaN", lambda: s.steer("blocks.1", v * float("nan"))),
            ("ascend", lambda: s.steer("blocks.1", v, positions=[5, 4])),
            ("negative", lambda: s.patch(v, "blocks.1", positions=[-1])),
            ("rows", lambda: s.patch(vector(1, 3, WIDTH), "blocks.1", positions=[1, 2])),
            ("did you mean", lambda: s.capture("logitz").run(prompt)),
            ("name the points", lambda: s.capture([]).run(prompt)),
            ("no edit 9", lambda: s.unsteer(9)),
        ):
            with pytest.raises(djinn.InvalidRequest, match=words):
                act()
        assert s.token_ids() == [] and s.edits() == []
        assert go_on(s, prompt) == reference.greedy(llama, prompt, NEW)
