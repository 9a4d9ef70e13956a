from __future__ import annotations

import os
from pathlib import Path

import pytest

from djinnd.server.handover.socket_path import StartError
from djinnd.server.principals.book import TokenFileContent, new_token
from djinnd.server.principals.file import NAME, TokenFile

CONTENT = TokenFileContent(
    [new_token("ci", None, "batch", 1.5, 2.5)[0], new_token("é", 1000, None, 1.0, None)[0]], ["old"]
)


@pytest.fixture
def file(tmp_path: Path) -> TokenFile:
    written = TokenFile(str(tmp_path))
    written.write(CONTENT)
    return written


def test_written_tokens_are_read_back(file: TokenFile) -> None:
    assert file.read() == CONTENT
    assert file.path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(file.path.parent) == [NAME] and file.notes == []


def test_no_file_is_no_token(tmp_path: Path) -> None:
    assert TokenFile(str(tmp_path)).read() == TokenFileContent()


def test_a_file_with_any_byte_changed_or_cut_off_is_set_aside(file: TokenFile) -> None:
    sound = file.path.read_bytes()
    for place in range(0, len(sound), 7):
        changed = bytearray(sound)
        changed[place] ^= 1
        for data in (bytes(changed), sound[:place]):
            file.path.write_bytes(data)
            assert file.read() == TokenFileContent(), (place, data)
            assert not file.path.exists()
    assert len(file.damaged_files) == 2 * -(-len(sound) // 7)
    assert f"kept as {file.damaged_files[0]}" in file.notes[0]


def test_a_folder_in_its_place_keeps_the_daemon_from_starting(tmp_path: Path) -> None:
    (tmp_path / NAME).mkdir()
    with pytest.raises(StartError, match="cannot be read"):
        TokenFile(str(tmp_path)).read()


def test_where_nothing_can_be_written_the_old_file_stays(file: TokenFile, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        file.write(TokenFileContent())
    assert file.read() == CONTENT


def test_a_file_of_any_size_is_read_whole(tmp_path: Path) -> None:
    content = TokenFileContent(retired=[f"{number:064}" for number in range(300_000)])
    file = TokenFile(str(tmp_path))
    file.write(content)
    assert file.read() == content and file.damaged_files == []
