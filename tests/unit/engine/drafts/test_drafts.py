"""Drafts that cannot guess for a model are refused, and one that fails leaves the step as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from msgspec import structs

from djinn_client.errors import InvalidRequest
from djinn_client.protocol import Placing, Sampling
from djinnd.core.headed import Headed
from djinnd.core.session import Session
from djinnd.core.tuning import HEADS
from djinnd.engine.drafts.draft_passes import DraftPasses
from djinnd.engine.drafts.drafts import Drafts
from djinnd.engine.io.channel import ServerGone
from djinnd.engine.run.hidden_states import HiddenStates
from djinnd.messages import Load
from tests.families.configurations import reduced
from tests.support.checkpoints import random_model
from tests.support.drafted import WithDraft
from tests.support.heads import with_head
from tests.support.loaded import Served, small_pages
from tests.support.models import reduced_model

FOLDER = reduced_model("llama-2")
WANTED = Load(0, "m", "", placing=Placing(speculation=True, draft="draft"))


@pytest.fixture
def served() -> Iterator[WithDraft]:
    with WithDraft(FOLDER, FOLDER, small_pages(50), plan=small_pages(50)) as served:
        served.runner.load, served.drafter = WANTED, None
        yield served


def drafts_of(served: WithDraft) -> Drafts:
    drafts = Drafts(served.scheduler, {"m": served.runner, "draft": served.draft})
    drafts.check(WANTED, served.runner.weights.skeleton)
    drafts.attach(served.runner)
    return drafts


def begin(served: WithDraft, session: Session) -> None:
    """The session generates text without repetition, and the time of its steps is known."""
    served.submit(session, [5, 6, 7], 40, Sampling(temperature=1.5, seed=1), may_guess=True)
    for _ in range(8):
        served.step()


def test_a_draft_or_a_target_with_states_is_refused(served: WithDraft, tmp_path: Path) -> None:
    with Served(random_model(tmp_path, reduced("qwen3_5_text"))) as hybrid:
        for target, draft, name in ((served, hybrid, "draft"), (hybrid, served, "m")):
            drafts = Drafts(served.scheduler, {"draft": draft.runner})
            with pytest.raises(InvalidRequest, match=f"{name} keeps states.*load m without a draft"):
                drafts.check(WANTED, target.runner.weights.skeleton)


def test_a_draft_that_streams_is_refused(served: WithDraft) -> None:
    with Served(FOLDER, placing=Placing(resident=1)) as streaming:
        drafts = Drafts(served.scheduler, {"draft": streaming.runner})
        with pytest.raises(InvalidRequest, match="draft cannot guess for m: 3 of its blocks stream"):
            drafts.check(WANTED, served.runner.weights.skeleton)


@pytest.fixture(scope="module")
def headed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return with_head(tmp_path_factory.mktemp("headed") / "model", "glm4_moe")


@pytest.fixture
def served_by_head(headed: Path) -> Iterator[WithDraft]:
    with WithDraft(headed, headed, small_pages(50), is_head=True, plan=small_pages(50)) as served:
        assert served.drafter is not None
        served.drafter.release()
        served.runner.load, served.drafter = WANTED, None
        yield served


def step(served: WithDraft, drafts: Drafts) -> None:
    batch = served.scheduler.next_batch()
    assert batch is not None
    launched = served.runner.launch(batch)
    drafts.launched("m")
    served.complete(batch, served.runner.finish(launched))


def test_a_head_that_fails_within_a_step_of_its_target_guesses_no_more(
    served_by_head: WithDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("broken")

    served, session = served_by_head, served_by_head.open()
    drafts = drafts_of(served)
    served.submit(session, [5, 6, 7], 8, may_guess=True)
    step(served, drafts)
    assert isinstance(session.drafted, Headed) and session.drafted.kept
    monkeypatch.setattr(HiddenStates, "note", fail)
    step(served, drafts)
    assert session.drafted is None
    served.run()
    assert len(session.tokens) == 11
    assert served.draft.hidden is not None and served.draft.hidden.free == HEADS.places


def test_a_head_whose_target_has_no_known_final_norm_is_refused(served_by_head: WithDraft) -> None:
    skeleton = served_by_head.runner.weights.skeleton
    skeleton.points = structs.replace(skeleton.points, norm="")
    drafts = Drafts(served_by_head.scheduler, {"draft": served_by_head.draft})
    with pytest.raises(InvalidRequest, match=r"has not found the final norm of m.*load it without a draft"):
        drafts.check(WANTED, skeleton)


def test_a_draft_is_not_unloaded_before_its_target(served: WithDraft) -> None:
    drafts = drafts_of(served)
    with pytest.raises(AssertionError, match="draft is unloaded while it guesses for"):
        drafts.detach("draft")
    drafts.detach("m")
    drafts.detach("draft")


@pytest.mark.parametrize("error", [RuntimeError, ServerGone])
def test_a_draft_that_fails_guesses_no_more(
    served: WithDraft, monkeypatch: pytest.MonkeyPatch, error: Callable[[str], Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error("broken")

    drafts = drafts_of(served)
    begin(served, served.open())
    monkeypatch.setattr(DraftPasses, "run", fail)
    batch = served.scheduler.next_batch()
    assert batch is not None
    if error is ServerGone:
        with pytest.raises(ServerGone):
            drafts.added(batch, lambda: False)
        return
    assert drafts.added(batch, lambda: False) is batch
    monkeypatch.undo()
    assert drafts.added(batch, lambda: False) is batch, "it is tried once"
    served.draft.kv.check_integrity()


def test_rows_get_guesses_and_the_pages_come_back(served: WithDraft) -> None:
    drafts = drafts_of(served)
    session = served.open()
    begin(served, session)
    batch = served.scheduler.next_batch()
    assert batch is not None
    (row,) = drafts.added(batch, lambda: False).rows
    assert row.guess and row.count == 1 + len(row.guess)
    assert drafts.go_on("m", batch.rows) and session.drafted is not None
    drafts.check_integrity()
    served.scheduler.close(session.id)
    with pytest.raises(AssertionError, match="knows the closed sessions"):
        drafts.check_integrity()
    drafts.close("m", session.id)
    drafts.check_integrity()
    assert session.drafted is None
    assert served.draft.kv.lend(0, served.draft.kv.pool.free) is not None, "no page is lent any more"
