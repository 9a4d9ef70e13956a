"""Sessions of a hybrid model through a daemon: pauses, tiers, forks, steering, breakpoints, engine losses, restarts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client.errors import InvalidRequest
from djinnctl.restart import restart
from tests.conftest import DaemonStarter
from tests.families.configurations import reduced
from tests.support import reference
from tests.support.checkpoints import random_model
from tests.support.daemon import Daemon
from tests.support.loaded import random_prompt

NEW = 6


def greedy(session: djinn.Session, prompt: list[int] | None = None) -> list[int]:
    return session.generate(prompt, max_tokens=NEW, ignore_eos=True).token_ids


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("hybrid") / "model", reduced("qwen3_5_text"))


@pytest.fixture(scope="module")
def daemon(folder: Path) -> Iterator[Daemon]:
    with DaemonStarter() as start:
        yield start({"models": {"hybrid": {"path": str(folder)}}}, errors=["engine_lost"])


def test_sessions_go_on_wherever_their_pages_have_been(folder: Path, daemon: Daemon) -> None:
    prompt = random_prompt(300, 300, seed=3)
    told = reference.greedy(folder, prompt, 3 * NEW)
    with djinn.Session("hybrid", address=daemon.address) as s:
        assert greedy(s, prompt) == told[:NEW]
        with s.fork() as fork:
            s.pause()
            s.unpause()
            assert greedy(fork) == told[NEW : 2 * NEW]
        assert greedy(s) == told[NEW : 2 * NEW]
        s.truncate(len(prompt) + NEW)
        assert greedy(s) == told[NEW : 2 * NEW]
        with pytest.raises(InvalidRequest, match="hand over the tokens only"):
            s.kv()
        assert greedy(s) == told[2 * NEW :]
    with daemon.client() as client:
        assert client.status(check=True).integrity == []


def test_a_breakpoint_goes_on_and_steering_changes_what_follows(folder: Path, daemon: Daemon) -> None:
    prompt = random_prompt(90, 300, seed=5)
    told = reference.greedy(folder, prompt, NEW)
    with djinn.Session("hybrid", address=daemon.address) as s:
        s.breakpoint("blocks.2")
        assert s.generate(prompt, max_tokens=NEW, ignore_eos=True).finish_reason == "breakpoint"
        assert s.resume(max_tokens=NEW, ignore_eos=True).token_ids == told
    with djinn.Session("hybrid", address=daemon.address) as s:
        s.steer("blocks.1", [4.0] * 64)
        assert greedy(s, prompt) != told
        s.unsteer()
        s.truncate(0)
        assert greedy(s, prompt) == told


@pytest.mark.long
@pytest.mark.parametrize("warm", [True, False])
def test_a_session_outlives_its_daemon(folder: Path, daemon: Daemon, warm: bool) -> None:
    prompt = random_prompt(300, 300, seed=9 + warm)
    told = reference.greedy(folder, prompt, 2 * NEW)
    with djinn.Session("hybrid", address=daemon.address) as s:
        assert greedy(s, prompt) == told[:NEW]
        with daemon.client() as client:
            restart(client, warm=warm)
        with djinn.Session.attach(s.id, address=daemon.address) as again:
            assert greedy(again) == told[NEW:]
        assert djinn.status(check=True, address=daemon.address).integrity == []


def test_a_session_outlives_its_engine(folder: Path, daemon: Daemon) -> None:
    prompt = random_prompt(90, 300, seed=7)
    told = reference.greedy(folder, prompt, 2 * NEW)
    with djinn.Session("hybrid", address=daemon.address) as s:
        assert greedy(s, prompt) == told[:NEW]
        daemon.kill_engine()
        assert greedy(s) == told[NEW:]
