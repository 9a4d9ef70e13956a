"""Functions of a client at points of a model have the effect of hooks in transformers, and none if they change
nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import djinn_client as djinn
from tests.support import ops, reference
from tests.support.daemon import Daemon
from tests.support.edited import assert_close, loaded, prompt_of, vector
from tests.support.torch_hooks import Change, Hooked

NEW = 5  # tokens generated per call
AT = "blocks.1.hook_resid_post"
LATER = "blocks.3.hook_resid_post"
PROMPT = prompt_of(30, 3)


@pytest.fixture(scope="module")
def llama(daemon: Daemon) -> Iterator[Path]:
    with loaded(daemon, "llama-3.1") as folder:
        yield folder


@pytest.fixture
def session(llama: Path, daemon: Daemon) -> Iterator[djinn.Session]:
    with djinn.Session(str(llama), address=daemon.address) as s:
        yield s


def said(session: djinn.Session, **options: Any) -> djinn.Generated:
    return session.generate(PROMPT, max_tokens=NEW, ignore_eos=True, **options)


def test_a_function_that_only_looks_changes_nothing(session: djinn.Session, llama: Path) -> None:
    """The output is equal bit for bit, also with sampling, and the function sees the same values as a hook."""
    options = {"temperature": 0.9, "seed": 5, "top_k": 40, "repetition_penalty": 1.2, "logprobs": 3}
    expected = said(session, **options)
    session.truncate(0)
    seen: list[tuple[djinn.InterventionContext, Tensor]] = []
    session.intervene(AT, lambda activation, context: seen.append((context, activation.clone())), local=True)
    found = said(session, **options)
    assert (found.token_ids, found.text, found.logprobs) == (expected.token_ids, expected.text, expected.logprobs)
    assert (found.finish_reason, found.usage, found.hit) == ("length", expected.usage, None)
    assert session.edits() == []
    assert [context.when for context, _ in seen] == ["prefill"] + ["decode"] * (NEW - 1)
    assert [context.positions for context, _ in seen] == [range(30), *(range(n, n + 1) for n in range(30, 29 + NEW))]
    hooked = Hooked(llama).run([*PROMPT, *found.token_ids[:-1]], wanted=[AT])[1][AT]
    assert_close(torch.cat([activation[0] for _, activation in seen]), hooked, AT)


def test_functions_at_prompt_and_generated_tokens_equal_hooks(session: djinn.Session, llama: Path) -> None:
    session.intervene("model.layers.1", lambda activation, context: activation * -0.5, local=True)
    assert said(session).token_ids == Hooked(llama).greedy(PROMPT, NEW, [Change(AT, ops.scale(-0.5))])


def test_several_functions_at_once(session: djinn.Session, llama: Path) -> None:
    """A third function is at the first one's point and runs after it. One is called at generated tokens only."""
    v = vector(1)

    def scale(activation: Tensor, context: djinn.InterventionContext) -> None:
        activation *= 0.5

    session.intervene(LATER, lambda activation, context: activation + v, local=True, when="decode")
    session.intervene(AT, scale, local=True)
    session.intervene(AT, lambda activation, context: activation + v, local=True)
    changes = [
        Change(AT, ops.scale(0.5)),
        Change(AT, ops.add(v)),
        Change(LATER, ops.add(v), start=len(PROMPT)),
    ]
    assert said(session).token_ids == Hooked(llama).greedy(PROMPT, NEW, changes)


def test_an_exception_of_a_function_and_its_removal(session: djinn.Session, llama: Path, daemon: Daemon) -> None:
    def fail(activation: Tensor, context: djinn.InterventionContext) -> None:
        if context.when == "decode":
            activation.zero_()
            raise ArithmeticError("of the caller's own")

    plain = reference.greedy(llama, PROMPT, NEW)
    handle = session.intervene(AT, fail, local=True)
    with pytest.raises(ArithmeticError, match="of the caller's own"):
        said(session)
    assert djinn.sessions(address=daemon.address)[0].state == "stopped"
    assert session.token_ids() == [*PROMPT, plain[0]]
    handle.remove()
    told = session.resume(max_tokens=NEW - 1, ignore_eos=True)
    assert isinstance(told, djinn.Generated) and told.token_ids == plain[1:]
    assert session.edits() == []


def test_forks_continue_with_their_parent_s_functions(session: djinn.Session, llama: Path) -> None:
    session.intervene(AT, lambda activation, context: activation * -0.5, local=True, when="decode")
    session.generate(PROMPT[:-3], max_tokens=1)
    session.truncate(len(PROMPT) - 3)
    with session.fork() as t:
        found = t.generate(PROMPT[-3:], max_tokens=NEW, ignore_eos=True).token_ids
    assert found == Hooked(llama).greedy(PROMPT, NEW, [Change(AT, ops.scale(-0.5), start=len(PROMPT))])


def test_a_stop_string_over_several_tokens(daemon: Daemon) -> None:
    """On the model with a tokenizer: text, tokens and end are the same as without the function."""
    with djinn.Session("djinn-tiny", address=daemon.address) as s:
        prompt = "class Stack:\n    def pop(self):\n"
        full = s.generate(prompt, max_tokens=24)
        tokens = len(full.token_ids)
        stop = full.text[4:12]
        s.truncate(0)
        expected = s.generate(prompt, max_tokens=24, stop=stop)
        assert expected.finish_reason == "stop" and 1 < len(expected.token_ids) < tokens
        s.truncate(0)
        handle = s.intervene("blocks.2", lambda activation, context: None, local=True)
        found = s.generate(prompt, max_tokens=24, stop=stop)
        assert (found.text, found.token_ids, found.finish_reason) == (expected.text, expected.token_ids, "stop")
        assert s.token_ids()[-len(found.token_ids) :] == found.token_ids
        handle.remove()
        s.truncate(len(s.token_ids()) - len(found.token_ids))
        assert s.generate(max_tokens=24).text == full.text
