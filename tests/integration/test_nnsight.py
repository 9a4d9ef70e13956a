"""The daemon and nnsight give the same results for nnsight's examples (reading, steering, patching) on a reduced
model."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import djinn_client as djinn
from tests.support.daemon import Daemon, clean_environ, warm_python
from tests.support.edited import loaded
from tests.support.nnsight_examples import NEW, OTHER, PROMPT, READ, V


@pytest.fixture(scope="module")
def llama(daemon: Daemon) -> Iterator[Path]:
    with loaded(daemon, "llama-3.1") as folder:
        yield folder


@pytest.fixture(scope="module")
def theirs(llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    results = tmp_path_factory.mktemp("nnsight") / "results.pt"
    ran = subprocess.run(
        [warm_python(), "-m", "tests.support.nnsight_examples", str(llama), str(results)],
        cwd=Path(__file__).parents[2],
        env=clean_environ(),
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return torch.load(results)


@pytest.fixture
def session(llama: Path, daemon: Daemon) -> Iterator[djinn.Session]:
    with djinn.Session(str(llama), address=daemon.address) as s:
        yield s


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def test_captures_equal_nnsight_s(theirs: Any, session: djinn.Session) -> None:
    cache = session.capture(READ).run(PROMPT)
    for name, expected in zip(READ, theirs["reading"], strict=True):
        assert_close(cache[name], expected)


def test_steering(theirs: Any, session: djinn.Session) -> None:
    session.steer("model.layers.1", V, scale=2)
    assert session.generate(PROMPT, max_tokens=NEW, ignore_eos=True).token_ids == theirs["steering"].tolist()


def test_steering_by_a_function(theirs: Any, session: djinn.Session) -> None:
    session.intervene("model.layers.1", lambda activation, context: activation + 2 * V, local=True)
    assert session.generate(PROMPT, max_tokens=NEW, ignore_eos=True).token_ids == theirs["steering"].tolist()


def test_patching(theirs: Any, session: djinn.Session) -> None:
    cache = session.capture("model.layers.1").run(PROMPT)
    session.truncate(0)
    session.patch(cache["model.layers.1"], positions=[3])
    assert_close(session.capture("logits").run(OTHER)["logits"], theirs["patching"])
