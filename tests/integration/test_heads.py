"""The head of a checkpoint guesses for its model in a daemon: no token changes, and steps are saved."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest

import djinn_client as djinn
from djinn_client.errors import DjinnError, InvalidRequest, ModelRejected
from tests.conftest import DaemonStarter
from tests.families.configurations import reduced
from tests.support.checkpoints import random_model
from tests.support.daemon import Daemon
from tests.support.heads import alike, with_head
from tests.support.loaded import random_prompt

VOCAB = 300


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("models")
    # Deep enough for a pass of the head to be short beside a step, also on a busy machine.
    path = str(with_head(folder / "model", "glm4_moe", alike, blocks=16))
    bare = str(random_model(folder / "bare", reduced("glm4_moe")))
    models = {
        "head": {"path": path, "part": "heads"},
        "headed": {"path": path, "speculation": {"draft": "head"}},
        "second": {"path": path, "speculation": {"draft": "head"}},
        "plain": {"path": path},
        "stranger": {"path": bare, "speculation": {"draft": "head"}},
        "headless": {"path": bare, "part": "heads"},
    }
    with DaemonStarter() as start:
        shared = {"dtype": "float32", "kv": "16MiB"}
        yield start(
            {"memory": "3GiB", "models": {name: shared | told for name, told in models.items()}},
            errors=["model_failed", "engine_lost"],
        )


def live(daemon: Daemon, model: str, life: int) -> tuple[list[list[int]], int]:
    """The life of a session that is cut, forked and paused. → the tokens of its replies, and how many were guessed."""
    chance, replies, kept, length = random.Random(life), list[list[int]](), 0, 0

    def ask(session: djinn.Session, prompt: list[int]) -> None:
        nonlocal kept, length
        temperature = chance.choice([0.0, 1.2])
        reply = session.generate(prompt, max_tokens=30, ignore_eos=True, temperature=temperature, seed=life)
        replies.append(reply.token_ids)
        kept, length = kept + reply.usage.kept_tokens, reply.usage.session_tokens

    with djinn.Session(model, address=daemon.address, priority="batch") as session:
        ask(session, random_prompt(600, VOCAB, 0))  # a prefix of all sessions
        ask(session, random_prompt(chance.randint(1, 90), VOCAB, life))
        session.truncate(chance.randint(600, length - 1))
        ask(session, random_prompt(5, VOCAB, life))
        with session.fork() as fork:
            ask(fork, random_prompt(20, VOCAB, life))
            session.pause("host")
            session.unpause()
            ask(session, random_prompt(40, VOCAB, life))
    return replies, kept


def test_sessions_get_the_tokens_that_they_get_without_a_head(daemon: Daemon) -> None:
    with ThreadPoolExecutor(3) as threads:
        found = {model: [*threads.map(partial(live, daemon, model), range(3))] for model in ("headed", "plain")}
    assert [replies for replies, _ in found["headed"]] == [replies for replies, _ in found["plain"]]
    assert sum(kept for _, kept in found["headed"]) > 50
    assert sum(kept for _, kept in found["plain"]) == 0
    with daemon.client() as client:
        assert client.status(check=True).integrity == []


def drawn(daemon: Daemon, model: str) -> djinn.Generated:
    """A text without repetition, which lookups cannot guess."""
    with djinn.Session(model, address=daemon.address, priority="batch") as session:
        prompt = random_prompt(90, VOCAB, 9)
        return session.generate(prompt, max_tokens=100, ignore_eos=True, temperature=1.2, seed=3)


def test_a_head_that_thinks_as_its_target_gives_several_tokens_a_step(daemon: Daemon) -> None:
    drawn(daemon, "headed")
    reply = drawn(daemon, "headed")
    assert reply.token_ids == drawn(daemon, "plain").token_ids
    assert reply.usage.kept_tokens > 0.9 * reply.usage.guessed_tokens > 0
    assert 100 / (100 - reply.usage.kept_tokens) > 1.7


def test_head_and_target_come_back_after_the_loss_of_the_engine(daemon: Daemon) -> None:
    expected = drawn(daemon, "plain").token_ids
    with djinn.Session("headed", address=daemon.address, priority="batch") as session:
        stream = session.stream(random_prompt(90, VOCAB, 9), max_tokens=100, ignore_eos=True, temperature=1.2, seed=3)
        pieces = [next(stream)]
        daemon.kill_engine()
        pieces += stream
        assert [token for piece in pieces for token in piece.token_ids] == expected
    assert drawn(daemon, "headed").usage.kept_tokens > 0


def test_the_memory_of_a_head_comes_back(daemon: Daemon) -> None:
    with daemon.client() as client:
        for model in [*client.models()]:
            if model.state == "ready" and model.name != "head":
                client.unload(model.name, force=True)
        if any(model.state == "ready" for model in client.models()):
            client.unload("head")
        used = client.status(check=True).devices[0].used_bytes
        client.load("headed")
        assert any("head guesses for it" in note for note in client.load("headed").notes)
        client.unload("headed", force=True)
        client.unload("head", force=True)
        status = client.status(check=True)
        assert status.integrity == [] and status.devices[0].used_bytes == used


@pytest.mark.parametrize(
    ("model", "kind", "told"),
    [
        ("second", InvalidRequest, "head guesses for headed, and a head guesses for one model: unload headed first"),
        ("stranger", InvalidRequest, "head is the head of another checkpoint"),
        ("headless", ModelRejected, r"no head that predicts several tokens: it lacks tensor model\.layers\.4\.enorm"),
    ],
)
def test_a_head_that_cannot_guess_is_refused(daemon: Daemon, model: str, kind: type[DjinnError], told: str) -> None:
    with daemon.client() as client:
        client.load("headed")
        with pytest.raises(kind, match=told):
            client.load(model)


def test_a_head_has_no_sessions(daemon: Daemon) -> None:
    with pytest.raises(InvalidRequest, match=r"head is the head of a checkpoint.*open the session on that model"):
        djinn.Session("head", address=daemon.address)
