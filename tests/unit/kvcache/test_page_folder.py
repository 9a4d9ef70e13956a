from __future__ import annotations

import os
from pathlib import Path

import pytest

from djinnd.kvcache import page_folder
from djinnd.kvcache.page_file import PageFile
from djinnd.kvcache.page_folder import remove_abandoned
from tests.support.descriptors import open_descriptors

EXTENT = 4096


def leave(folder: Path, name: str, used: float) -> None:
    """Makes a file of 25 pages that no process has open and that was last written at `used`."""
    PageFile(str(folder), name, EXTENT, 25, "f").close()
    pages = folder / f"{name}.pages"
    pages.write_bytes(bytes(25 * EXTENT))
    os.utime(pages, (used, used))


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list whose only item is the number of free bytes of the disk."""
    bytes_free = [1 << 40]
    monkeypatch.setattr(page_folder, "free_bytes", lambda folder: bytes_free[0])
    return bytes_free


def test_files_stay_while_there_is_room(tmp_path: Path, free: list[int]) -> None:
    for number in range(5):
        leave(tmp_path, f"m{number}", number)
    before, descriptors = names(tmp_path), open_descriptors()
    assert remove_abandoned(str(tmp_path), but="new") == []
    assert names(tmp_path) == before and open_descriptors() == descriptors


def test_on_a_short_disk_the_longest_unused_files_are_removed_and_open_ones_stay(
    tmp_path: Path, free: list[int]
) -> None:
    for number, name in enumerate(("wanted", "old", "open", "newer", "newest")):
        leave(tmp_path, name, number)
    used = PageFile(str(tmp_path), "open", EXTENT, 25, "f")
    # 3 files of 102,400 bytes are abandoned: that is less than an eighth free, and more than an eighth with 2 files
    free[0] = 40_000
    assert remove_abandoned(str(tmp_path), but="wanted") == ["old"]
    free[0] = 0
    assert remove_abandoned(str(tmp_path), but="wanted") == ["newer", "newest"]
    assert names(tmp_path) == {f"{name}.{kind}" for name in ("wanted", "open") for kind in ("table", "pages")}
    used.close()


def test_the_number_of_abandoned_files_is_limited(
    tmp_path: Path, free: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_folder, "KEPT_FILES", 3)
    for number in range(5):
        leave(tmp_path, f"m{number}", number)
    assert remove_abandoned(str(tmp_path), but="m9") == ["m0", "m1"]


def test_a_missing_folder_has_no_abandoned_files(tmp_path: Path) -> None:
    assert remove_abandoned(str(tmp_path / "none"), but="m") == []
