"""Hybrid models: some of their modules keep a state. Their sessions have the tokens and logits of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from djinnd.core.batch import LATE
from djinnd.core.session import Session
from tests.families.configurations import reduced
from tests.families.one_family import Outcome, try_family
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.loaded import Served, random_prompt, small_pages

VOCAB, PAGE = 300, 16


@pytest.mark.parametrize("family", ["qwen3_5_text", "lfm2", "nemotron_h"])
def test_mixed_batches_equal_transformers(family: str, tmp_path: Path) -> None:
    """Gated delta rule, short convolutions, and Mamba 2. All others are in test-long, see tests/families."""
    assert try_family(family, tmp_path) == Outcome(True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("hybrid"), reduced("qwen3_5_text"))


@pytest.fixture
def served(folder: Path) -> Iterator[Served]:
    with Served(folder, plan=small_pages(60, PAGE), max_batch_tokens=48) as served:
        served.shuffle_pages()
        yield served


def prompt(length: int, seed: int = 0) -> list[int]:
    return random_prompt(length, VOCAB, seed)


def error_of(served: Served, folder: Path, session: Session, tokens: list[int]) -> float:
    """Runs `tokens` in the session → the largest difference of their logits from transformers'."""
    request = served.submit(session, tokens)
    served.run()
    logits: Tensor = served.logits_of(request)
    wanted = torch.from_numpy(reference.logits(folder, session.tokens))[-len(logits) :]
    return (logits - wanted).abs().max().item()


@pytest.mark.parametrize("length", [70, 64, 60, 33, 5])
def test_a_truncated_session_goes_on_from_the_end_of_a_page(served: Served, folder: Path, length: int) -> None:
    session = served.open()
    served.submit(session, prompt(70), max_tokens=8)
    served.run()
    computed = session.computed
    served.scheduler.truncate(session.id, length)
    assert session.computed == (length if length == computed else length // PAGE * PAGE)
    assert error_of(served, folder, session, prompt(20, seed=1)) < 1e-4


@pytest.mark.parametrize("generated", [3, 11])
def test_a_fork_goes_on_from_the_state_of_its_parent(served: Served, folder: Path, generated: int) -> None:
    parent = served.open()
    served.submit(parent, prompt(50), max_tokens=generated)
    served.run()
    child = served.fork(parent)
    assert child.computed == parent.computed
    assert error_of(served, folder, parent, prompt(9, seed=2)) < 1e-4
    assert error_of(served, folder, child, prompt(7, seed=3)) < 1e-4


def test_a_last_token_that_is_run_again_follows_its_own_past(served: Served, folder: Path) -> None:
    """After a forward pass, the next token is sampled from the last one, of which the state has been computed."""
    session = served.open()
    assert error_of(served, folder, session, prompt(40)) < 1e-4
    served.submit(session, [], max_tokens=12)
    served.run()
    assert session.tokens[40:] == reference.greedy(folder, prompt(40), 12, session.tokens[40:])


def test_a_token_that_came_too_late_is_run_again_from_the_end_of_a_page(served: Served, folder: Path) -> None:
    """The state of the last page has passed the position that is run again."""
    session = served.open()
    served.submit(session, prompt(20), max_tokens=6)
    batch = served.step()
    assert batch is not None and session.computed == 20
    late = served.scheduler.next_batch()
    assert late is not None
    served.runner.run(late)
    served.scheduler.complete(late, [LATE])
    again = served.scheduler.next_batch()
    assert again is not None
    assert [(row.start, row.end) for row in again.rows] == [(PAGE, 21)]
    served.complete(again, served.runner.run(again))
    served.run()
    assert session.tokens[20:] == reference.greedy(folder, prompt(20), 6, session.tokens[20:])


def test_prefixes_are_shared_with_their_states(served: Served, folder: Path) -> None:
    first, second = served.open(), served.open()
    assert error_of(served, folder, first, prompt(50)) < 1e-4
    request = served.submit(second, [*prompt(50), 7], max_tokens=4)
    served.run()
    assert request.computed == 51 - 48
    told = second.tokens[51:]
    assert told == reference.greedy(folder, [*prompt(50), 7], 4, told)
