from __future__ import annotations

from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client.arguments.folders import model_name
from djinn_client.errors import ModelNotFound
from djinn_client.files.pulled import UNFINISHED, models_folder, pulled_folder
from djinn_client.protocol import LoadModel, ModelInfo, ModelReply
from djinn_client.transport.unix_channel import UnixChannel
from tests.support.scripted_daemon import Line, ScriptedDaemon


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The caller's folder: one model has come whole, one is half there, of one there is only a folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("DJINN_MODELS", raising=False)
    folder = tmp_path / "data" / "djinnd" / "models"
    (folder / "org" / "name").mkdir(parents=True)
    (folder / "org" / "name" / "config.json").write_text("{}")
    (folder / "org" / "begun").mkdir()
    (folder / "org" / "half").mkdir()
    (folder / "org" / "half" / "config.json").write_text("{}")
    (folder / "org" / "half" / UNFINISHED).touch()
    return folder


def test_a_pulled_model_is_named_by_its_hub_id(
    models: Path, daemon: ScriptedDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    def script(line: Line) -> None:
        line.welcome()
        asked = line.expect(LoadModel)
        line.send(ModelReply(id=asked.id, model=ModelInfo(name=asked.model, path=asked.model)))

    folder, address = str(models / "org" / "name"), daemon.play(script)
    assert pulled_folder("org/name") == folder
    assert djinn.load("org/name", address=address).name == folder
    monkeypatch.setattr(UnixChannel, "passes_files", False)  # as of a daemon on another machine
    for name in ("org/name", "org/half"):
        assert djinn.load(name, address=address).name == name


@pytest.mark.parametrize("name", ["org/other", "org/begun", "llama", "", "../org/name", "org/name/x"])
def test_names_that_were_not_pulled_have_no_folder(models: Path, name: str) -> None:
    assert pulled_folder(name) is None


def test_half_a_model_is_told_with_the_remedy(models: Path) -> None:
    with pytest.raises(ModelNotFound, match="`djinnctl pull org/half` fetches the rest"):
        pulled_folder("org/half")


def test_a_folder_that_is_there_comes_first(models: Path, tmp_path: Path) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert model_name("org/name") == str(tmp_path / "org" / "name")


def test_the_folder_may_be_another(models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DJINN_MODELS", str(tmp_path / "mine"))
    assert models_folder() == tmp_path / "mine"
    assert pulled_folder("org/name") is None
