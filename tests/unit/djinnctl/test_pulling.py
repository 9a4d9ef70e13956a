"""`djinnctl pull` against a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from djinn_client.files.pulled import UNFINISHED
from tests.support.stub_hub import StubHub, stub_hub

WEIGHTS = os.urandom(12 << 20)  # the library writes pieces of 10 MiB
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "chat_template.jinja": b"{{ messages }}",
    "pytorch_model.bin": b"a pickle",
    "modeling.py": b"code",
}

Djinnctl = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> StubHub:
    with stub_hub("org/name", FILES) as hub:
        yield hub


@pytest.fixture
def djinnctl(hub: StubHub, tmp_path: Path) -> Djinnctl:
    """A process of its own: huggingface_hub reads where the hub is when it is imported."""

    def call(*arguments: str) -> subprocess.CompletedProcess[str]:
        environ = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "HF_ENDPOINT": hub.address, "NO_COLOR": "1"}
        environ |= {"PYTHONPATH": ":".join(filter(None, sys.path)), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-m", "djinnctl", *arguments]
        return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)

    return call


def test_a_broken_download_is_gone_on_with(djinnctl: Djinnctl, hub: StubHub, tmp_path: Path) -> None:
    hub.cut["model.safetensors"] = 11 << 20
    done = djinnctl("pull", "org/name")
    if done.returncode:  # the library may try again by itself
        done = djinnctl("pull", "org/name")
    folder = tmp_path / ".local/share/djinnd/models/org/name"
    assert (done.returncode, done.stdout) == (
        0,
        f"org/name is in {folder}\nTalk to it: djinnctl run org/name\n",
    ), done.stderr
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    fetched = [served.first for served in hub.served if served.path == "model.safetensors"]
    assert len(fetched) == 2 and fetched[0] == 0 < fetched[1], "what has come is not fetched again"
    assert {served.path for served in hub.served} == {"config.json", "model.safetensors", "chat_template.jinja"}
    hub.served.clear()
    assert json.loads(djinnctl("pull", "org/name", "--json").stdout) == {"folder": str(folder)}
    assert hub.served == [], "all of it is there"


def test_pull_puts_the_model_below_the_given_folder(djinnctl: Djinnctl, tmp_path: Path) -> None:
    done = djinnctl("pull", "org/name", "--to", str(tmp_path / "models"))
    folder = tmp_path / "models/org/name"
    assert done.stdout == f"org/name is in {folder}\nTalk to it: djinnctl run {folder}\n", done.stderr


def test_the_mark_of_a_broken_download_goes_when_the_rest_has_come(
    djinnctl: Djinnctl, hub: StubHub, tmp_path: Path
) -> None:
    mark = tmp_path / ".local/share/djinnd/models/org/name" / UNFINISHED
    assert djinnctl("pull", "org/name").returncode == 0
    mark.touch()
    hub.hub_id = "org/gone"
    assert djinnctl("pull", "org/name").returncode == 1, "a hub that does not have it says nothing of what is here"
    assert mark.exists()
    hub.hub_id = "org/name"
    assert djinnctl("pull", "org/name").returncode == 0
    assert not mark.exists()


def test_a_model_that_does_not_exist_leaves_no_folder(djinnctl: Djinnctl, tmp_path: Path) -> None:
    done = djinnctl("pull", "org/other")
    assert done.returncode == 1 and "org/other could not be fetched" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / ".local/share/djinnd/models/org").exists(), "a mistyped name leaves nothing"
    assert djinnctl("pull", "no-hub-id").returncode == 2
