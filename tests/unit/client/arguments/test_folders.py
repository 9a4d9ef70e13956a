from __future__ import annotations

import os
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client.arguments.folders import model_name
from djinn_client.protocol import Failure, FilesHandedOver, HandOverFiles, LoadModel, ModelInfo, ModelReply
from tests.support.scripted_daemon import Line, ScriptedDaemon


@pytest.fixture
def there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "models" / "llama").mkdir(parents=True)
    (tmp_path / "models" / "llama" / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("models/llama", "models/llama"),
        ("models//llama/", "models/llama"),
        ("./models/llama", "models/llama"),
        ("./not/there", "not/there"),
        (".", ""),
        ("~/x", "home/x"),
    ],
)
def test_folders_of_the_caller_s_are_made_absolute(there: Path, name: str, folder: str) -> None:
    assert model_name(name) == str(there / folder)
    assert model_name(f"/{there}//{folder}/.") == str(there / folder)


def test_a_relative_path_of_a_file_is_no_hub_id(there: Path) -> None:
    (there / "models" / "model.safetensors").touch()
    assert model_name("models/model.safetensors") == str(there / "models" / "model.safetensors")


@pytest.mark.parametrize("name", ["djinn-tiny", "models", "org/name", "not/there", "", "a/b/c", "with\0zero/x"])
def test_names_that_are_no_paths_are_sent_unchanged(there: Path, name: str) -> None:
    assert model_name(name) == name


def wanted(line: Line, request: LoadModel) -> None:
    line.send(Failure(id=request.id, code="files_wanted", message="hand them over", data={"folder": "/etc"}))


def test_files_are_handed_over_of_the_folder_that_was_named_and_the_request_repeated(
    daemon: ScriptedDaemon, there: Path
) -> None:
    asked = []

    def script(line: Line) -> None:
        line.welcome()
        first = line.expect(LoadModel)
        wanted(line, first)
        handed = line.expect(HandOverFiles)
        line.send(FilesHandedOver(id=handed.id, model="/theirs"))
        second = line.expect(LoadModel)
        asked.extend([first.model, handed.folder, handed.names, handed.others, second.model])
        line.send(ModelReply(id=second.id, model=ModelInfo(name="/theirs", path="/theirs")))

    (there / "models" / "llama" / "model.bin").write_text("x")
    assert djinn.load("models/llama", address=daemon.play(script)).name == "/theirs"
    folder = str(there / "models" / "llama")
    assert asked == [folder, folder, ["config.json"], ["model.bin"], "/theirs"]


def test_a_daemon_that_asks_for_files_of_a_name_gets_none(daemon: ScriptedDaemon, there: Path) -> None:
    def script(line: Line) -> None:
        line.welcome()
        wanted(line, line.expect(LoadModel))

    with pytest.raises(djinn.FilesWanted):
        djinn.load("llama", address=daemon.play(script))


def test_a_folder_that_is_not_there_is_told_by_the_client(daemon: ScriptedDaemon, there: Path) -> None:
    def script(line: Line) -> None:
        line.welcome()
        wanted(line, line.expect(LoadModel))

    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(djinn.ModelNotFound, match="no such folder"):
        djinn.load("./nothing", address=daemon.play(script))
    daemon.stop()
    assert len(os.listdir("/proc/self/fd")) <= before
