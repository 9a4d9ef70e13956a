"""Sessions of models with states through a daemon: tiers, forks, captures, edits, breakpoints, losses, restarts."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import djinn_client as djinn
from djinn_client.errors import InvalidRequest
from djinnctl.restart import restart
from tests.conftest import DaemonStarter
from tests.families.configurations import reduced
from tests.support import ops, reference
from tests.support.checkpoints import random_model
from tests.support.daemon import Daemon
from tests.support.loaded import random_prompt
from tests.support.parameters import long_except
from tests.support.torch_hooks import Change, Hooked

NEW = 6
WIDTH = 64
FAMILIES = {"hybrid": "qwen3_5_text", "mamba": "mamba2"}  # Mamba 2 has no attention


def greedy(session: djinn.Session, prompt: list[int] | None = None) -> list[int]:
    return session.generate(prompt, max_tokens=NEW, ignore_eos=True).token_ids


def some_rows(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    return {name: random_model(made / name, reduced(family)) for name, family in FAMILIES.items()}


@pytest.fixture(scope="module")
def folder(folders: dict[str, Path]) -> Path:
    return folders["hybrid"]


def configured(folders: dict[str, Path]) -> dict[str, object]:
    return {"models": {name: {"path": str(folder)} for name, folder in folders.items()}}


@pytest.fixture(scope="module")
def daemon(folders: dict[str, Path]) -> Iterator[Daemon]:
    with DaemonStarter() as start:
        yield start(configured(folders), errors=["engine_lost"])


@pytest.mark.parametrize("model", FAMILIES)
def test_sessions_go_on_wherever_their_pages_have_been(folders: dict[str, Path], daemon: Daemon, model: str) -> None:
    prompt = random_prompt(300, 300, seed=3)
    told = reference.greedy(folders[model], prompt, 3 * NEW)
    with djinn.Session(model, address=daemon.address) as s:
        assert greedy(s, prompt) == told[:NEW]
        with s.fork() as fork:
            assert s.pause("disk").pages > 0 and s.info.pages == 0
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


def test_sixteen_sessions_join_and_leave(folders: dict[str, Path], daemon: Daemon) -> None:
    lengths = [1, 2, 15, 16, 17, 64, 90, 255, 256, 257, 300, 7, 33, 400, 5, 128]
    prompts = [random_prompt(length, 300, seed=40 + place) for place, length in enumerate(lengths)]
    models = [list(FAMILIES)[place % 2] for place in range(len(prompts))]

    def say(model: str, prompt: list[int], count: int) -> list[int]:
        with djinn.Session(model, address=daemon.address) as s:
            return s.generate(prompt, max_tokens=count, ignore_eos=True).token_ids

    counts = [4 + place % 5 for place in range(len(prompts))]
    with ThreadPoolExecutor(len(prompts)) as threads:
        told = list(threads.map(say, models, prompts, counts))
    for model, prompt, answer, count in zip(models, prompts, told, counts, strict=True):
        assert answer == reference.greedy(folders[model], prompt, count, answer), f"{model}, {len(prompt)} tokens"


def test_a_breakpoint_goes_on_from_disk_with_an_edited_activation(folder: Path, daemon: Daemon) -> None:
    prompt = random_prompt(90, 300, seed=5)
    with djinn.Session("hybrid", address=daemon.address) as s:
        s.breakpoint("blocks.2", when="prefill")
        hit = s.run(prompt, max_tokens=NEW, ignore_eos=True)
        assert isinstance(hit, djinn.Hit)
        s.pause("disk")
        hit.activation[:, -20:] *= 0.5
        told = s.resume(max_tokens=NEW, ignore_eos=True).token_ids
    change = Change("blocks.2.hook_resid_post", ops.scale(0.5), positions=range(70, 90))
    assert told == Hooked(folder).greedy(prompt, NEW, [change])


def test_captures_and_edits_equal_those_of_hooks(folder: Path, daemon: Daemon) -> None:
    """The patch lies behind the state, so the session goes back to the end of a page before it."""
    model, prompt = Hooked(folder), random_prompt(90, 300, seed=6)
    points = [f"blocks.{block}.hook_resid_post" for block in range(4)]
    with djinn.Session("hybrid", address=daemon.address) as s:
        seen = s.capture(points).run(prompt)
        for point, wanted in model.run(prompt, wanted=points)[1].items():
            torch.testing.assert_close(torch.as_tensor(seen[point][0]), wanted, atol=1e-4, rtol=1e-4)
        rows = some_rows(1, 1, WIDTH)
        s.patch(rows, "blocks.1", positions=[60])
        patch = Change("blocks.1.hook_resid_post", ops.replace(rows), positions=[60])
        tokens = prompt + greedy(s)
        assert tokens[90:] == model.greedy(prompt, NEW, [patch])
        steered = some_rows(2, WIDTH)
        s.steer("blocks.2", steered, scale=2)
        change = Change("blocks.2.hook_resid_post", ops.add(steered, 2), start=len(tokens) - 1)
        assert greedy(s) == model.greedy(tokens, NEW, [patch, change])


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


@pytest.mark.parametrize("model", long_except(("hybrid",), FAMILIES))
def test_a_call_goes_on_after_its_engine_was_killed(folders: dict[str, Path], daemon: Daemon, model: str) -> None:
    prompt = random_prompt(90, 300, seed=7)
    told = reference.greedy(folders[model], prompt, 5 * NEW)
    heard: list[int] = []
    with djinn.Session(model, address=daemon.address) as s:
        for piece in s.stream(prompt, max_tokens=4 * NEW, ignore_eos=True):
            if len(heard) < NEW <= len(heard) + len(piece.token_ids):
                daemon.kill_engine()
            heard += piece.token_ids
        assert heard == told[: 4 * NEW]
        assert greedy(s) == told[4 * NEW :]


def test_a_session_outlives_its_killed_daemon(folders: dict[str, Path], start_daemon: DaemonStarter) -> None:
    """The next daemon has the session's tokens in the journal, and its pages on disk or not."""
    prompt = random_prompt(300, 300, seed=8)
    told = reference.greedy(folders["hybrid"], prompt, 2 * NEW)
    killed = start_daemon(configured(folders))
    s = djinn.Session("hybrid", address=killed.address)
    assert greedy(s, prompt) == told[:NEW]
    killed.kill()
    s.detach()
    state = f"{Path(killed.address).parent}/state"
    start_daemon({"socket": killed.address, "state_dir": state} | configured(folders))
    with djinn.Session.attach(s.id, address=killed.address) as again:
        assert greedy(again) == told[NEW:]
