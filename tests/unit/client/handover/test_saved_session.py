from __future__ import annotations

import os
import stat
from pathlib import Path

import msgspec
import pytest

from djinn_client.errors import FileDamaged, InvalidRequest
from djinn_client.handover import saved_session
from djinn_client.handover.saved_session import SavedFile, SavedSession, checksum, is_saved_session, write
from djinn_client.protocol.fields.kv_layout import KvLayout

LAYOUT = KvLayout("float32", blocks=2, page_size=16, kv_heads=2, head_dim=4)
PAGES = bytes(range(256)) * (LAYOUT.nbytes(20) // 256)


def session(**changes: object) -> SavedSession:
    told = SavedSession(
        model="m",
        fingerprint="f" * 64,
        priority="agent",
        tokens=list(range(20)),
        kv=LAYOUT,
        kv_tokens=20,
        kv_checksum=checksum(PAGES),
    )
    return msgspec.structs.replace(told, **changes)


def written(folder: Path, told: SavedSession | None = None, pages: bytes | None = PAGES) -> Path:
    path = folder / "s.djinn"
    write(path, told or session(), None if pages is None else memoryview(pages))
    return path


def read(path: Path) -> tuple[SavedSession, bytes]:
    file = SavedFile(path)
    try:
        into = bytearray(file.session.kv_bytes)
        if into:
            file.read_pages(memoryview(into))
        return file.session, bytes(into)
    finally:
        file.close()


def test_a_written_session_file_is_read_back(tmp_path: Path) -> None:
    assert read(written(tmp_path)) == (session(), PAGES)


def test_tokens_alone_are_a_small_file(tmp_path: Path) -> None:
    told = session(kv=None, kv_tokens=0, kv_checksum=b"")
    path = written(tmp_path, told, pages=None)
    assert read(path) == (told, b"")
    assert path.stat().st_size < 1000


def test_pages_begin_on_a_page_of_the_disk(tmp_path: Path) -> None:
    assert written(tmp_path).read_bytes().index(PAGES) == 4096


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    assert stat.S_IMODE(written(tmp_path).stat().st_mode) == 0o600


def test_a_file_that_cannot_be_written_whole_leaves_the_one_of_before(tmp_path: Path) -> None:
    path = written(tmp_path)
    with pytest.raises(TypeError):
        write(path, session(), "no bytes")  # type: ignore[arg-type]
    assert read(path) == (session(), PAGES)
    assert list(tmp_path.iterdir()) == [path]


def test_the_folder_is_synced_after_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: done.append(os.path.basename(os.readlink(f"/proc/self/fd/{fd}"))))
    replace = os.replace
    monkeypatch.setattr(os, "replace", lambda a, b: (done.append("rename"), replace(a, b)))
    written(tmp_path)
    assert [name.split("-")[0] for name in done] == [".s.djinn", "rename", tmp_path.name.split("-")[0]]


@pytest.mark.parametrize("place", [16, 40, 4096, 4096 + len(PAGES) - 1])
def test_a_flipped_bit_is_found(tmp_path: Path, place: int) -> None:
    path = written(tmp_path)
    damaged = bytearray(path.read_bytes())
    damaged[place] ^= 4
    path.write_bytes(damaged)
    with pytest.raises(FileDamaged, match="is damaged"):
        read(path)


@pytest.mark.parametrize("length", [0, 7, 30, 60, 4096, 5000])
def test_a_file_that_is_cut_short_is_found(tmp_path: Path, length: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(FileDamaged):
        read(path)


def test_an_announced_size_is_believed_only_where_the_file_has_it(tmp_path: Path) -> None:
    """No memory is reserved for it."""
    huge = msgspec.structs.replace(LAYOUT, blocks=1 << 23, head_dim=1 << 23)
    path = written(tmp_path, session(kv=huge))
    with pytest.raises(FileDamaged, match=r"its KV, which has 4,096 of [\d,]{20,} bytes"):
        SavedFile(path)


def test_a_header_that_contradicts_itself(tmp_path: Path) -> None:
    path = written(tmp_path, session(kv_tokens=21))
    with pytest.raises(FileDamaged, match="21 of 20 tokens have KV"):
        SavedFile(path)
    path = written(tmp_path, session(kv=msgspec.structs.replace(LAYOUT, page_size=0)))
    with pytest.raises(FileDamaged, match="its header"):
        SavedFile(path)


def test_a_later_version_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_session, "VERSION", 9)
    path = written(tmp_path)
    monkeypatch.undo()
    with pytest.raises(InvalidRequest, match="version 9, this djinn_client reads 1"):
        SavedFile(path)


def test_a_saved_session_is_recognised_by_its_first_bytes(tmp_path: Path) -> None:
    assert is_saved_session(written(tmp_path)) and is_saved_session(str(tmp_path / "s.djinn"))
    (tmp_path / "other").write_text("something else")
    for path in (tmp_path, tmp_path / "other", tmp_path / "none", "djinn-tiny"):
        assert not is_saved_session(path)


@pytest.mark.parametrize("kind", ["pipe", "folder", "device"])
def test_pipes_folders_and_devices_are_no_saved_sessions(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "s.djinn"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    assert not is_saved_session(path)
    with pytest.raises(FileDamaged, match="no regular file") as caught:
        SavedFile(path)
    assert caught.value.data["path"] == str(path)
