from __future__ import annotations

import os
import shutil

import pytest

from djinn_client.errors import InvalidRequest, ModelNotFound
from djinnd.server.models.open_files import are_same, digest, duplicates, is_at, open_folder, take_over


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "model.safetensors"):
        (path / name).write_text("{}")
    return path


def marks_of(folder):
    opened = open_folder(str(folder))
    opened.close()
    return opened.marks


def test_a_checkpoint_is_identified_by_its_files_under_any_name(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder)
    (tmp_path / "linked").mkdir()
    for name in os.listdir(folder):
        os.link(folder / name, tmp_path / "linked" / name)
    shutil.copytree(folder, tmp_path / "copy")
    marks = marks_of(folder)
    same = {name: are_same(marks, marks_of(tmp_path / name)) for name in ("link", "linked", "copy")}
    assert same == {"link": True, "linked": True, "copy": False}
    assert is_at(str(tmp_path / "link"), marks) and not is_at(str(tmp_path / "copy"), marks)
    assert not is_at("/nowhere", marks)


def test_one_more_file_or_another_one_makes_another_checkpoint(folder):
    before = marks_of(folder)
    (folder / "tokenizer.json").write_text("{}")
    more = marks_of(folder)
    (folder / "tokenizer.json").unlink()
    (folder / "other").write_text("{}")
    (folder / "other").rename(folder / "model.safetensors")
    assert not are_same(before, more) and not are_same(before, marks_of(folder))
    assert not is_at(str(folder), before)
    assert len({digest(before), digest(more), digest(marks_of(folder))}) == 3


def test_a_changed_file_has_another_mark_and_its_checkpoint_stays_the_same(folder):
    before = marks_of(folder)
    os.utime(folder / "config.json", ns=(0, 0))
    assert are_same(before, marks_of(folder)) and before != marks_of(folder)


def test_a_folder_without_a_config_is_no_checkpoint(folder):
    (folder / "config.json").rename(folder / "params.json")
    with pytest.raises(ModelNotFound, match=r"no config\.json; it is a consolidated checkpoint"):
        open_folder(str(folder))


def test_descriptors_that_are_taken_over_have_one_owner(folder):
    fds = [os.open(folder / name, os.O_RDONLY) for name in ("config.json", "model.safetensors")]
    opened = take_over("/a", ["config.json", "model.safetensors"], fds, ["readme.md"])
    assert (fds, opened.files.folder, opened.files.others) == ([], "/a", ["readme.md"])
    assert are_same(opened.marks, marks_of(folder))
    copies = duplicates(opened.files)
    opened.close()
    assert [os.pread(fd, 2, 0) for fd in copies] == [b"{}", b"{}"]
    with pytest.raises(InvalidRequest):
        take_over("/a", ["config.json"], copies, [])
    assert copies == []
