from __future__ import annotations

from pathlib import Path

import huggingface_hub
import pytest

from djinnd.server.checkpoints.hub_download import fetch


def test_a_hub_id_is_fetched_without_pickles(monkeypatch, tmp_path):
    asked = {}

    def download(hub_id, allow_patterns):
        asked[hub_id] = allow_patterns
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert fetch("org/name") == f"folder {tmp_path}"
    assert not any(Path("pytorch_model.bin").match(pattern) for pattern in asked["org/name"])
    assert any(Path("model-00001-of-00002.safetensors").match(pattern) for pattern in asked["org/name"])


@pytest.mark.parametrize(("offline", "words"), [("1", "HF_HUB_OFFLINE is set"), ("", "connection to the hub")])
def test_a_hub_that_does_not_answer(monkeypatch, offline, words):
    def download(hub_id, allow_patterns):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setenv("HF_HUB_OFFLINE", offline)
    told = fetch("org/name")
    assert told.startswith("error org/name ") and words in told and "no route" in told
