"""Files of a checkpoint are opened once, are regular, and are read through their descriptors with a limit."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from djinn_client.errors import InvalidRequest, ModelNotFound, ModelRejected
from djinn_client.files.model_files import ModelFiles


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_bytes(b"{}")
    (tmp_path / "model.safetensors").write_bytes(bytes(range(100)))
    (tmp_path / "readme.md").write_bytes(b"other")
    return tmp_path


def test_a_folder_is_opened_as_the_files_that_checkpoints_have(folder: Path) -> None:
    with ModelFiles.open(str(folder)) as files:
        assert sorted(files) == ["config.json", "model.safetensors"]
        assert files.others == ["readme.md"]
        assert files.read("config.json") == b"{}"
        assert files.read_at("model.safetensors", 90, 50) == bytes(range(90, 100))


def test_an_opened_file_stays_when_its_name_leads_elsewhere(folder: Path) -> None:
    with ModelFiles.open(str(folder)) as files:
        (folder / "config.json").unlink()
        os.mkfifo(folder / "config.json")
        assert files.read("config.json") == b"{}"


def test_a_pipe_is_refused_without_waiting(folder: Path) -> None:
    os.mkfifo(folder / "tokenizer.json")
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json is no regular file"):
        ModelFiles.open(str(folder))


def test_a_device_is_refused_before_it_is_opened(folder: Path) -> None:
    """Opening some devices has effects. Without a terminal, opening this one would be another error."""
    (folder / "tokenizer.json").symlink_to("/dev/tty")
    with pytest.raises(InvalidRequest, match=r"tokenizer\.json is no regular file"):
        ModelFiles.open(str(folder))


def test_a_link_that_leads_nowhere_and_a_name_that_is_no_text_are_passed_over(folder: Path) -> None:
    (folder / "tokenizer.json").symlink_to("nowhere")
    for name in (b"\xff.safetensors", b"\xff.bin", b"a\nb.safetensors"):
        (folder / os.fsdecode(name)).write_bytes(b"")
    with ModelFiles.open(str(folder)) as files:
        assert (sorted(files), files.others) == (["config.json", "model.safetensors"], ["readme.md"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read_is_told_as_that(folder: Path) -> None:
    (folder / "config.json").chmod(0)
    with pytest.raises(ModelRejected, match=r"config\.json cannot be opened: Permission denied"):
        ModelFiles.open(str(folder))


@pytest.mark.parametrize("flags", [os.O_PATH, os.O_WRONLY, 3])
def test_a_descriptor_that_is_not_open_for_reading_is_refused_and_closed(folder: Path, flags: int) -> None:
    fd = os.open(folder / "config.json", flags)
    with pytest.raises(InvalidRequest, match=r"config\.json is not open for reading"):
        ModelFiles.handed_over("/a", ["config.json"], [fd])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(fd)


def test_no_folder_is_not_found(folder: Path) -> None:
    with pytest.raises(ModelNotFound):
        ModelFiles.open(str(folder / "nothing"))


def test_a_file_of_a_checkpoint_leads_to_its_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(ModelNotFound, match=f"a checkpoint is named by its folder, here {tmp_path}"):
        ModelFiles.open(str(file))


def test_a_large_file_is_refused_before_it_is_read(folder: Path) -> None:
    with ModelFiles.open(str(folder)) as files, pytest.raises(ModelRejected, match="at most 99"):
        files.read("model.safetensors", limit=99)


def test_a_file_that_was_cut_gives_fewer_bytes_and_no_signal(folder: Path) -> None:
    with ModelFiles.open(str(folder)) as files:
        os.truncate(folder / "model.safetensors", 10)
        memory = memoryview(bytearray(100))
        assert files.read_into("model.safetensors", 0, memory) == 10


@pytest.mark.parametrize("name", ["", "..", "a/b", "x" * 256])
def test_names_that_are_paths_are_refused_and_the_descriptors_closed(folder: Path, name: str) -> None:
    descriptor = os.open(folder / "config.json", os.O_RDONLY)
    with pytest.raises(InvalidRequest):
        ModelFiles.handed_over("there", [name], [descriptor])
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


def test_a_pipe_that_is_handed_over_is_refused(folder: Path) -> None:
    reading, writing = os.pipe()
    os.close(writing)
    with pytest.raises(InvalidRequest, match="no regular file"):
        ModelFiles.handed_over("there", ["config.json"], [reading])
