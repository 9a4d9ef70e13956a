"""Another user's config.json that promises more than the files beside it contain, or requests endless work.

A bystander streams during every case. The attacker gets an error that names the field or the tensor, the engine lives
on, and the daemon has in use at the end what it had before.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import djinn_client as djinn
from tests.conftest import MODEL, DaemonStarter
from tests.families.configurations import reduced
from tests.support.bystander import Bystander
from tests.support.checkpoints import random_model
from tests.support.daemon import Daemon, holdings
from tests.support.models import reduced_model
from tests.support.other_user import as_user, only_root, open_to_all

ATTACKER = 23002
Act = Callable[..., object]
pytestmark = only_root


@pytest.fixture(scope="module")
def target() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        daemon = start(errors=["model_failed"])
        open_to_all(daemon.folder, daemon.address)
        with daemon.client() as client:
            client.load(MODEL, kv_bytes=64 << 20)
        with Bystander(daemon.address):
            pass
        before = holdings(daemon)
        yield daemon
        assert holdings(daemon) == before


@pytest.fixture
def theirs(target: Daemon) -> Iterator[Path]:
    folder = target.folder / "theirs"
    yield folder
    shutil.rmtree(folder)


def refused(target: Daemon, folder: Path, act: Act, told: str) -> None:
    """Checks that the act is refused, while a bystander streams. The attacker's next call works."""
    _hand_to_attacker(folder)
    with Bystander(target.address), as_user(ATTACKER):
        with pytest.raises(djinn.ModelRejected, match=told):
            act(str(folder), address=target.address)
        with djinn.Session(MODEL, address=target.address) as s:
            assert s.generate("def f", max_tokens=2, ignore_eos=True).token_ids


def _hand_to_attacker(folder: Path) -> None:
    for path in (folder, *folder.iterdir()):
        os.chown(path, ATTACKER, ATTACKER)
        path.chmod(0o700 if path.is_dir() else 0o600)


@pytest.mark.parametrize(
    ("act", "family", "changes", "told"),
    [
        (djinn.load, "gpt-j", {"n_positions": 30_000_000}, r"MiB of tables .*; at most 256\.0 MiB"),
        (djinn.plan, "llama-2", {"num_hidden_layers": 10**9}, r"num_hidden_layers is 1e\+09; at most 65,536"),
        (djinn.load, "llama-2", {"vocab_size": 1 << 30}, r"shape \[512, 64\] .* model needs \[1073741824, 64\]"),
        (djinn.plan, "mixtral", {"intermediate_size": 1 << 24}, r"experts\S+ cannot be merged: .* the model needs"),
    ],
    ids=["tables", "blocks", "vocabulary", "experts"],
)
def test_a_configuration_that_promises_too_much_is_refused(
    target: Daemon, theirs: Path, act: Act, family: str, changes: dict[str, Any], told: str
) -> None:
    shutil.copytree(reduced_model(family), theirs)
    path = theirs / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    refused(target, theirs, act, told)


def test_a_model_that_only_its_first_steps_show_to_be_unfit_is_refused(target: Daemon, theirs: Path) -> None:
    """Its files are valid, so only the engine's check at load can find it."""
    random_model(theirs, reduced("diffllama"))
    refused(target, theirs, djinn.load, "diffllama fails the check at load")
