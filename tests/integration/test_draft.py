"""A draft changes no token: sessions live the same lives with a draft, with a bad one, and without."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client.errors import DjinnError, InvalidRequest, ModelNotFound
from tests.conftest import DaemonStarter
from tests.integration.test_speculation import live
from tests.support.checkpoint_files import tiny_with
from tests.support.daemon import Daemon
from tests.support.deepened import contrary, deepened
from tests.support.serving import TINY

LIVES = 2
PROMPT = "class Stack:\n    def push(self"


def other_tokens(tokenizer: dict) -> None:  # type: ignore[type-arg]  # JSON
    vocabulary = tokenizer["model"]["vocab"]
    last, before = sorted(vocabulary, key=vocabulary.__getitem__)[-1:-3:-1]
    vocabulary[last], vocabulary[before] = vocabulary[before], vocabulary[last]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    deep = deepened(folder / "deep", 4)
    paths: dict[str, tuple[Path, object]] = {
        "small": (TINY, "off"),
        "contrary": (contrary(folder / "contrary"), "off"),
        "foreign": (tiny_with(folder / "foreign", other_tokens), "off"),
        "deep": (deep, {"draft": "small"}),
        "misled": (deep, {"draft": "contrary"}),
        "plain": (deep, "off"),
        "nested": (deep, {"draft": "deep"}),
        "own": (TINY, {"draft": "own"}),
        "mixed": (deep, {"draft": "foreign"}),
        "lonely": (deep, {"draft": "nothing"}),
    }
    models = {
        name: {"path": str(path), "dtype": "float32", "speculation": what, "kv": "64MiB"}
        for name, (path, what) in paths.items()
    }
    with DaemonStarter() as start:
        yield start({"memory": "3GiB", "models": models}, errors=["model_failed", "engine_lost"])


def test_sessions_get_the_tokens_that_they_get_without_a_draft(daemon: Daemon) -> None:
    with ThreadPoolExecutor(LIVES) as threads:
        found = {
            model: [*threads.map(partial(live, daemon, model), range(LIVES))] for model in ("deep", "misled", "plain")
        }
    for good, bad, none in zip(*found.values(), strict=True):
        assert good[0] == none[0]
        assert bad[0] == none[0]
    kept = {model: sum(count for _, count in lives) for model, lives in found.items()}
    assert kept["deep"] > kept["plain"] == 0
    with daemon.client() as client:
        assert client.status(check=True).integrity == []


def drawn(daemon: Daemon, model: str) -> djinn.Generated:
    """A text without repetition, which lookups cannot guess. Its class has no targets that a busy machine may miss."""
    with djinn.Session(model, address=daemon.address, priority="batch") as session:
        return session.generate(PROMPT, max_tokens=60, ignore_eos=True, temperature=1.2, seed=3)


def test_a_draft_that_thinks_as_its_target_saves_most_steps(daemon: Daemon) -> None:
    drawn(daemon, "deep")
    reply, plain = drawn(daemon, "deep"), drawn(daemon, "plain")
    assert reply.token_ids == plain.token_ids
    assert reply.usage.kept_tokens > 20
    assert reply.usage.kept_tokens > 0.9 * reply.usage.guessed_tokens


def test_a_draft_that_is_wrong_is_hardly_asked(daemon: Daemon) -> None:
    drawn(daemon, "misled")
    reply = drawn(daemon, "misled")
    assert reply.token_ids == drawn(daemon, "plain").token_ids
    assert reply.usage.guessed_tokens < 60


def test_sessions_and_drafts_come_back_after_the_loss_of_the_engine(daemon: Daemon) -> None:
    expected = drawn(daemon, "plain").token_ids
    with djinn.Session("deep", address=daemon.address, priority="batch") as session:
        stream = session.stream(PROMPT, max_tokens=60, ignore_eos=True, temperature=1.2, seed=3)
        pieces = [next(stream)]
        daemon.kill_engine()
        pieces += stream
        assert [token for piece in pieces for token in piece.token_ids] == expected
    assert drawn(daemon, "deep").usage.kept_tokens > 0


def test_a_draft_stays_as_long_as_a_model_needs_it(daemon: Daemon) -> None:
    with daemon.client() as client:
        ready = {model.name for model in client.models() if model.state == "ready"}
        for name in ("misled", "plain", "contrary", "foreign"):
            if name in ready:
                client.unload(name, force=True)
        client.load("deep")
        with pytest.raises(InvalidRequest, match="small guesses for deep: unload deep first"):
            client.unload("small", force=True)
        client.unload("deep", force=True)
        client.unload("small", force=True)
        used = client.status(check=True).devices[0].used_bytes
        client.load("plain", speculation={"draft": "small"})
        assert {model.name for model in client.models() if model.state == "ready"} == {"small", "plain"}
        client.unload("plain", force=True)
        client.unload("small", force=True)
        status = client.status(check=True)
        assert status.integrity == [] and status.devices[0].used_bytes == used


@pytest.mark.parametrize(
    ("model", "kind", "told"),
    [
        ("nested", InvalidRequest, "has a draft itself"),
        ("own", InvalidRequest, "its own draft"),
        ("lonely", ModelNotFound, "the configuration has no model nothing"),
        ("mixed", InvalidRequest, "foreign cannot guess for mixed, because their tokens differ"),
    ],
)
def test_a_draft_that_cannot_guess_is_refused(daemon: Daemon, model: str, kind: type[DjinnError], told: str) -> None:
    with daemon.client() as client, pytest.raises(kind, match=told):
        client.load(model)
