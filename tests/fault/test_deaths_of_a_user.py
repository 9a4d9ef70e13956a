"""A user brings models that kill engines, under new names: soon they are no longer loaded, and other users are
served."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client import errors
from tests.support.other_user import as_user, only_root, open_to_all
from tests.support.scripted_engine.script import Script
from tests.support.served import Served, wait_for
from tests.support.serving import TINY

ALICE, BOB = 23001, 23002
pytestmark = only_root


@pytest.fixture
def theirs() -> Iterator[Path]:
    """A folder that all users can open."""
    path = Path(tempfile.mkdtemp(prefix="djinnd-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


def checkpoint(folder: Path, user: int) -> str:
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TINY / name, folder)
    for path in (folder, *folder.iterdir()):
        os.chown(path, user, user)
    return str(folder)


def served_by(serve: Callable[..., Served], script: Script) -> Served:
    daemon = serve(script, models={"ours": {"path": str(TINY)}})
    open_to_all(daemon.folder, daemon.address)
    return daemon


def answer(daemon: Served, model: str) -> list[int]:
    with djinn.Session(model, address=daemon.address) as session:
        return session.generate([5], max_tokens=3).token_ids


def restarts(daemon: Served) -> int:
    with daemon.client() as client:
        return client.status().devices[0].restarts


@pytest.mark.smoke
def test_a_user_s_models_that_kill_engines_are_no_longer_loaded_under_any_name(serve, theirs):
    bad = [checkpoint(theirs / name, ALICE) for name in ("first", "second", "third")]
    good, of_bob = checkpoint(theirs / "good", ALICE), checkpoint(theirs / "bob", BOB)
    daemon = served_by(serve, Script(on_load=dict.fromkeys(bad, "die")))
    with as_user(ALICE):
        with pytest.raises(errors.ModelRejected, match="2 engines have died"):
            djinn.load(bad[0], address=daemon.address)
        with pytest.raises(errors.QuotaExceeded, match="3 engines have died over models"):
            djinn.load(bad[1], address=daemon.address)
        for folder in (bad[2], good, bad[1]):
            with pytest.raises(errors.QuotaExceeded, match="configured models are served as before") as caught:
                djinn.load(folder, address=daemon.address)
            assert 0 < caught.value.data["retry_s"] <= 600
        assert answer(daemon, "ours") == [2, 3, 1]
    with as_user(BOB):
        assert answer(daemon, of_bob) == [2, 3, 1]
    wait_for(lambda: restarts(daemon) == 3)


def test_a_model_whose_requests_kill_engines_is_not_loaded_again(serve, theirs):
    good = checkpoint(theirs / "good", ALICE)
    daemon = served_by(serve, Script(on_token={"66": "die"}))
    with as_user(ALICE), djinn.Session(good, address=daemon.address) as session:
        with pytest.raises(errors.EngineLost, match="2 engines have died"):
            session.generate([66], max_tokens=3)
        with pytest.raises(errors.QuotaExceeded, match="3 engines have died over models"):
            session.generate([66], max_tokens=3)
        with pytest.raises(errors.QuotaExceeded, match="loaded again in"):
            session.generate([5], max_tokens=3)
        assert answer(daemon, "ours") == [2, 3, 1]
    wait_for(lambda: restarts(daemon) == 3)


def test_an_administrator_may_load_again_at_once(serve, theirs):
    bad = [checkpoint(theirs / name, 0) for name in ("first", "second")]
    daemon = served_by(serve, Script(on_load=dict.fromkeys(bad, "die")))
    for folder in bad:
        with pytest.raises(errors.ModelRejected, match="2 engines have died"):
            djinn.load(folder, address=daemon.address)
    wait_for(lambda: restarts(daemon) == 4)


def test_a_configured_model_is_not_blamed_for_a_request_that_kills_engines_during_its_load(serve, theirs):
    """The configured model takes a second to load again. The user's own model, with the request, is loaded before
    that."""
    good = checkpoint(theirs / "good", ALICE)
    daemon = served_by(serve, Script(on_token={"66": "die"}, on_load={"ours": "late"}))
    assert answer(daemon, "ours") == [2, 3, 1]
    with (
        as_user(ALICE),
        djinn.Session(good, address=daemon.address) as session,
        pytest.raises(errors.EngineLost, match="2 engines have died"),
    ):
        session.generate([66], max_tokens=3)
    assert answer(daemon, "ours") == [2, 3, 1]
    with daemon.client() as client:
        assert {model.name: model.state for model in client.models()}["ours"] == "ready"
    assert daemon.log.count("load_killed_engine model=ours deaths=1") == 1, "the request must come during the load"
    assert "load_killed_engine model=ours deaths=2" not in daemon.log
