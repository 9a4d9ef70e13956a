"""Functions of a client in the daemon's intervention process have the effect of hooks in transformers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support import ops
from tests.support.confined import confined, intervention_processes
from tests.support.daemon import Daemon, wait_for
from tests.support.edited import loaded, prompt_of, vector
from tests.support.torch_hooks import Change, Hooked

pytestmark = confined

NEW = 4  # tokens generated per call
AT = "blocks.1.hook_resid_post"
LATER = "blocks.3.hook_resid_post"
PROMPT = prompt_of(30, 3)
HALVED = [Change(AT, ops.scale(-0.5))]


@pytest.fixture(scope="module")
def target() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        yield start({"functions": {"users": [os.geteuid()]}})


@pytest.fixture(scope="module")
def llama(target: Daemon) -> Iterator[Path]:
    with loaded(target, "llama-3.1") as folder:
        yield folder


@pytest.fixture(scope="module")
def hooked(llama: Path) -> Hooked:
    return Hooked(llama)


@pytest.fixture(scope="module", autouse=True)
def held(llama: Path, target: Daemon) -> Iterator[None]:
    """Keeps the process alive by a session with a function, because each test would have to wait for its start."""
    with djinn.Session(str(llama), address=target.address) as s:
        s.intervene(AT, ignore())
        yield
    wait_for(lambda: not intervention_processes(target))


@pytest.fixture
def session(llama: Path, target: Daemon) -> Iterator[djinn.Session]:
    with djinn.Session(str(llama), address=target.address) as s:
        yield s


Function = Callable[[Any, djinn.InterventionContext], Any]


def ignore() -> Function:
    return lambda activation, context: None


def halve() -> Function:
    """A function that is pickled by value, as one defined in a script or a notebook is."""
    return lambda activation, context: activation * -0.5


def said(session: djinn.Session, **options: Any) -> djinn.Generated:
    return session.generate(PROMPT, max_tokens=NEW, ignore_eos=True, **options)


def test_functions_at_prompt_and_generated_tokens_equal_hooks(session: djinn.Session, hooked: Hooked) -> None:
    session.intervene("model.layers.1", halve())
    assert said(session).token_ids == hooked.greedy(PROMPT, NEW, HALVED)


def test_a_function_that_changes_nothing_has_no_effect(session: djinn.Session) -> None:
    options = {"temperature": 0.9, "seed": 5, "logprobs": 3}
    expected = said(session, **options)
    session.truncate(0)
    handle = session.intervene(AT, ignore())
    found = said(session, **options)
    assert (found.token_ids, found.text, found.logprobs) == (expected.token_ids, expected.text, expected.logprobs)
    assert session.edits() == []
    handle.remove()
    assert session.breakpoints() == []


def test_several_functions_and_the_objects_they_refer_to(session: djinn.Session, hooked: Hooked) -> None:
    """At one point each function sees the result of the one before. One writes in place; one runs in this process."""
    v = vector(1)

    def scale(activation: Any, context: djinn.InterventionContext) -> None:
        activation *= 0.5

    session.intervene(LATER, lambda activation, context: activation + v, local=True, when="decode")
    session.intervene(AT, scale)
    session.intervene("blocks.2.hook_resid_pre", lambda activation, context: activation + v)
    changes = [Change(AT, ops.scale(0.5)), Change(AT, ops.add(v)), Change(LATER, ops.add(v), start=len(PROMPT))]
    assert said(session).token_ids == hooked.greedy(PROMPT, NEW, changes)
    with pytest.raises(djinn.InvalidRequest, match="all of a point run in one place"):
        session.intervene("model.layers.1", ignore(), local=True)
    assert len(session.breakpoints()) == 3


@pytest.mark.long
def test_a_function_has_its_context_and_can_keep_state(session: djinn.Session) -> None:
    """It reports both in the activation, its only output."""
    calls: list[int] = []

    def note(activation: Any, context: djinn.InterventionContext) -> None:
        calls.append(len(context.positions))
        place = [len(calls), sum(calls), context.positions.start, context.layer, context.when == "decode"]
        activation[0, -1, : len(place)] = torch.tensor(place)

    handle = session.intervene(AT, note)
    said(session)
    handle.remove()
    tokens = session.token_ids()[:-1]
    session.truncate(0)
    seen = session.capture(AT).run(tokens)[AT][0, len(PROMPT) - 1 :, :5]
    last = range(len(PROMPT), len(PROMPT) + NEW - 1)
    expected = [[1, len(PROMPT), 0, 1, 0], *([n - len(PROMPT) + 2, n + 1, n, 1, 1] for n in last)]
    assert seen.tolist() == expected
    assert calls == []


def test_a_function_computes_as_in_any_process(session: djinn.Session) -> None:
    """It imports modules late, asks for the machine's properties, and uses libraries that start threads elsewhere."""

    def compute(activation: Any, context: djinn.InterventionContext) -> None:
        import statistics

        import numpy as np

        torch.seed()
        weights = torch.randn(activation.shape[-1], 8, requires_grad=True)
        (activation.float() @ weights).relu().sum().backward()
        assert weights.grad is not None and torch.linalg.svdvals(weights.grad).shape == (8,)
        torch.nn.functional.scaled_dot_product_attention(activation, activation, activation)
        torch.randn(512, 512) @ torch.randn(512, 512)
        assert statistics.fmean(np.linalg.svd(np.eye(8))[1]) == 1.0

    session.intervene(AT, compute)
    assert said(session).finish_reason == "length"


@pytest.mark.long
def test_forks_continue_with_their_parent_s_functions(session: djinn.Session, hooked: Hooked) -> None:
    """The process has received no functions for the fork yet."""
    session.intervene(AT, halve())
    with session.fork() as t:
        assert said(t).token_ids == hooked.greedy(PROMPT, NEW, HALVED)


def test_the_asynchronous_client_gives_the_same(llama: Path, target: Daemon, hooked: Hooked) -> None:
    async def play() -> list[int]:
        async with djinn.AsyncSession(str(llama), address=target.address) as s:
            handle = await s.intervene(AT, halve())
            told = await s.generate(PROMPT, max_tokens=NEW, ignore_eos=True)
            await handle.remove()
            return told.token_ids

    assert asyncio.run(play()) == hooked.greedy(PROMPT, NEW, HALVED)


@pytest.mark.long
def test_a_function_is_sent_again_to_a_new_process(session: djinn.Session, hooked: Hooked, target: Daemon) -> None:
    session.intervene(AT, halve())
    (process,) = intervention_processes(target)
    os.kill(process, signal.SIGKILL)
    wait_for(lambda: f"pid={process} status=-9" in target.log)
    assert said(session).token_ids == hooked.greedy(PROMPT, NEW, HALVED)
    assert len(intervention_processes(target)) == 1
