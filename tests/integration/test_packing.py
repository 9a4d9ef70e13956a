"""Packed weights in a daemon that computes in bfloat16, as configured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support.checkpoints import Tensors, altered, cast
from tests.support.daemon import wait_for
from tests.support.loaded import random_prompt

PROMPT = random_prompt(40, 512, 1)


def zeroed(tensors: Tensors) -> None:
    for name, tensor in tensors.items():
        tensors[name] = (0 * tensor if ".layers.2." in name and "proj" in name else tensor).to(torch.bfloat16)


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {
        "sound": altered(tmp_path / "sound", change=lambda tensors: cast(tensors, torch.bfloat16)),
        "zeros": altered(tmp_path / "zeros", change=zeroed),
    }


@pytest.mark.long
def test_packed_plain_and_unpackable_weights_give_the_same_tokens(
    start_daemon: DaemonStarter, folders: dict[str, Path]
) -> None:
    """The tokens are the same with packing and without, and also after a new engine has mapped the arena."""
    models = {
        f"{name}-{how}": {"path": str(folder), "dtype": "bfloat16", "resident": 1, "packing": how}
        for name, folder in folders.items()
        for how in ("auto", "off")
    }
    daemon = start_daemon({"memory": "2GiB", "models": models}, errors=["engine_lost"])
    with daemon.client() as client:
        infos = {name: client.load(name, kv_bytes=16 << 20) for name in models}
        assert all(info.blocks_streamed == 3 for info in infos.values())
        assert infos["sound-auto"].notes == [] and infos["sound-auto"].scratch_bytes > 0
        assert infos["sound-auto"].streamed_bytes < infos["sound-off"].streamed_bytes
        assert infos["sound-off"].notes == ["blocks stay plain: packing is off"]
        assert "lie outside of their unit's 16 exponents" in infos["zeros-auto"].notes[0]
        assert infos["zeros-auto"].scratch_bytes == 0
        before = tokens(daemon.address, list(models))
        assert before["sound-auto"] == before["sound-off"] and before["zeros-auto"] == before["zeros-off"]
        pid = daemon.kill_engine()
        wait_for(lambda: (device := daemon.device()).state == "ready" and device.pid != pid)
        for name in models:
            client.load(name)
        assert tokens(daemon.address, list(models)) == before
        assert client.status(check=True).integrity == []


def tokens(address: str, models: list[str]) -> dict[str, list[int]]:
    found = {}
    for model in models:
        with djinn.Session(model, address=address) as s:
            found[model] = list(s.generate(PROMPT, max_tokens=12, ignore_eos=True).token_ids)
    return found
