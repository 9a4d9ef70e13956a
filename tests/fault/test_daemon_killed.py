"""The daemon dies by SIGKILL, or restarts, with a loaded model: the next one has the model without reading its
checkpoint.

The engine's log shows if the checkpoint was read. A checkpoint that was written to is read again, even if its file's
size and modification time have not changed.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

import djinn_client as djinn
from djinnctl.restart import restart
from tests.conftest import DaemonStarter
from tests.support.daemon import Daemon, wait_for
from tests.support.models import reduced_model

PROMPT = [1, 2, 3, 4, 5]
TOKENS = 12


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A copy of a small model that a test may change."""
    return Path(shutil.copytree(reduced_model("llama-2"), tmp_path / "checkpoint"))


def greedy(daemon: Daemon, model: Path) -> list[int]:
    with djinn.Session(str(model), address=daemon.address) as s:
        return s.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True).token_ids


def change(checkpoint: Path) -> None:
    """Changes the weights so that every output token becomes the one after it. Size and time stay."""
    file = checkpoint / "model.safetensors"
    before = file.stat()
    weights = load_file(file)
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(1, 0)
    save_file(weights, file, metadata={"format": "pt"})
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file.stat().st_size == before.st_size


def times_read(daemon: Daemon) -> int:
    return daemon.log.count("checkpoint_read")


def model_state(daemon: Daemon, model: Path) -> str:
    return {info.name: info.state for info in djinn.models(address=daemon.address)}.get(str(model), "unknown")


@pytest.mark.smoke
def test_the_next_daemon_adopts_the_weights_and_computes_the_same(
    start_daemon: DaemonStarter, checkpoint: Path
) -> None:
    killed = start_daemon()
    expected = greedy(killed, checkpoint)
    name = killed.shared_memory()[0]  # of the weights; the object of the pages comes after it
    killed.kill()

    successor = start_daemon({"socket": killed.address, "state_dir": str(killed.folder / "state")})
    wait_for(lambda: model_state(killed, checkpoint) == "ready")  # without a request for it
    assert f"arena_adopted name=/{name} model={checkpoint}" in successor.log
    assert greedy(killed, checkpoint) == expected
    assert (times_read(killed), times_read(successor)) == (1, 0)
    assert djinn.status(check=True, address=killed.address).integrity == []
    djinn.unload(str(checkpoint), address=killed.address)
    assert killed.shared_memory() == []


def test_a_warm_restart_computes_the_same_and_a_cold_one_reads_the_checkpoint(
    start_daemon: DaemonStarter, checkpoint: Path
) -> None:
    daemon = start_daemon()
    expected = greedy(daemon, checkpoint)
    weights = daemon.shared_memory()[0]

    with daemon.client() as client:
        done = restart(client, warm=True)
        assert (done.state, done.pid, done.models) == ("ready", daemon.pid, [str(checkpoint)])
        assert greedy(daemon, checkpoint) == expected
        assert daemon.shared_memory()[0] == weights
        assert client.status(check=True).integrity == []
        assert times_read(daemon) == 1

        change(checkpoint)
        done = restart(client, warm=False)
        assert (done.state, done.models) == ("ready", [])
        assert daemon.shared_memory() == []
        assert greedy(daemon, checkpoint)[0] == expected[0] + 1, "the changed weights"


def test_a_changed_checkpoint_is_read_and_the_old_weights_are_removed(
    start_daemon: DaemonStarter, checkpoint: Path
) -> None:
    daemon = start_daemon()
    expected = greedy(daemon, checkpoint)
    change(checkpoint)
    with daemon.client() as client:
        restart(client, warm=True)
    assert greedy(daemon, checkpoint)[0] == expected[0] + 1
    assert "reason=the checkpoint or its layout has changed" in daemon.log
    assert len(daemon.shared_memory()) <= 2  # weights and pages
    assert djinn.status(check=True, address=daemon.address).integrity == []
