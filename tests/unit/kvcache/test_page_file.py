from __future__ import annotations

import errno
import mmap
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from djinnd.kvcache import page_file
from djinnd.kvcache.checksum import checksum
from djinnd.kvcache.page_file import BadPage, Bytes, PageFile, allocated_bytes
from djinnd.kvcache.tier import HOST_PAGE, Tier
from tests.support.descriptors import open_descriptors

PAGE_BYTES, EXTENT, SLOTS = 10_000, 12_288, 8
KEY = bytes(range(16))


class Folder:
    """Opens page files in a folder, and closes them at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.opened: list[PageFile] = []

    def open(
        self, page_bytes: int = PAGE_BYTES, slots: int = SLOTS, fingerprint: str = "f" * 64, any_size: bool = False
    ) -> PageFile:
        self.opened.append(PageFile(str(self.path), "model", page_bytes, slots, fingerprint, any_size=any_size))
        return self.opened[-1]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path / "pages")
    yield folder
    for file in folder.opened:
        file.close()


def empty_page(extent: int = EXTENT) -> Bytes:
    return np.frombuffer(mmap.mmap(-1, extent), np.uint8)


def random_page(seed: int, extent: int = EXTENT) -> Bytes:
    page = empty_page(extent)
    page[:] = np.random.default_rng(seed).integers(0, 256, extent, np.uint8)
    return page


def keep(file: PageFile, page: Bytes) -> Tier:
    """A tier that holds the page under KEY."""
    tier = Tier(file.table, file.slots)
    slot = tier.prepare(KEY)
    assert slot is not None
    tier.complete(slot, file.write(slot, page).result())
    return tier


def test_a_checksum_is_xxh3_and_of_every_byte() -> None:
    page = np.zeros(1000, np.uint8)
    assert checksum(np.frombuffer(b"", np.uint8)) == 0x2D06800538D394C2  # the value in XXH3's specification
    before = checksum(page)
    page[-1] = 1
    assert checksum(page) != before < 2**64


def test_pages_come_back_as_they_were_written(folder: Folder) -> None:
    file = folder.open()
    pages = {slot: random_page(slot) for slot in (0, 3, SLOTS - 1)}
    sums = {slot: file.write(slot, page).result() for slot, page in pages.items()}
    for slot, page in pages.items():
        assert sums[slot] == checksum(page[:PAGE_BYTES])
        into = empty_page()
        file.read(slot, into, sums[slot]).result()
        assert np.array_equal(into, page)


def test_a_read_only_page_can_be_written(folder: Folder) -> None:
    page = random_page(1)
    page.flags.writeable = False
    assert folder.open().write(0, page).result() == checksum(page[:PAGE_BYTES])


def test_a_flipped_bit_is_found(folder: Folder) -> None:
    file = folder.open()
    expected = file.write(2, random_page(1)).result()
    with open(folder.path / "model.pages", "r+b") as pages:
        pages.seek(2 * EXTENT + 5000)
        byte = pages.read(1)[0]
        pages.seek(-1, os.SEEK_CUR)
        pages.write(bytes([byte ^ 4]))
    with pytest.raises(BadPage, match=f"slot 2 has the checksum .* instead of {expected:016x}"):
        file.read(2, empty_page(), expected).result()


def test_a_slot_that_was_never_written_is_a_bad_page(folder: Folder) -> None:
    with pytest.raises(BadPage):
        folder.open().read(0, empty_page(), 1).result()


def test_slots_behind_the_end_of_a_cut_file_are_bad_pages(folder: Folder) -> None:
    file = folder.open()
    expected = file.write(SLOTS - 1, random_page(1)).result()
    os.truncate(folder.path / "model.pages", (SLOTS - 1) * EXTENT + HOST_PAGE)
    with pytest.raises(BadPage, match="slot 7 ends after 4,096 of 12,288 bytes"):
        file.read(SLOTS - 1, empty_page(), expected).result()


def test_the_next_owner_has_the_pages(folder: Folder) -> None:
    file, page = folder.open(), random_page(1)
    keep(file, page)
    file.close()
    file = folder.open()
    tier = Tier(file.table, SLOTS)
    slot = tier.find(KEY)
    assert slot is not None
    into = empty_page()
    file.read(slot, into, tier.checksum(slot)).result()
    assert np.array_equal(into, page)


def test_another_number_of_slots_is_kept_with_any_size(folder: Folder) -> None:
    page = random_page(1)
    file = folder.open()
    keep(file, page)
    file.close()
    file = folder.open(slots=SLOTS + 3, any_size=True)
    assert file.slots == SLOTS
    tier, into = Tier(file.table, file.slots), empty_page()
    slot = tier.find(KEY)
    assert slot is not None
    file.read(slot, into, tier.checksum(slot)).result()
    assert np.array_equal(into, page)
    file.close()
    os.truncate(folder.path / "model.pages", EXTENT)
    file = folder.open(slots=SLOTS + 3, any_size=True)
    assert file.slots == SLOTS + 3 and not file.table.any()
    file.close()
    file = folder.open(slots=SLOTS, fingerprint="e" * 64, any_size=True)
    assert file.slots == SLOTS and not file.table.any()


@pytest.mark.parametrize("other", [{"page_bytes": PAGE_BYTES + 1}, {"slots": SLOTS - 1}, {"fingerprint": "e" * 64}])
def test_pages_of_another_model_are_not_kept(folder: Folder, other: dict[str, Any]) -> None:
    file = folder.open()
    keep(file, random_page(1))
    file.close()
    file = folder.open(**other)
    assert not file.table.any() and Tier(file.table, file.slots).used == 0
    assert (folder.path / "model.pages").stat().st_blocks == 0


@pytest.mark.parametrize("name", ["model.table", "model.pages"])
@pytest.mark.parametrize("keeps", [None, 0, 4096, -1])
def test_files_that_are_not_whole_are_overwritten(folder: Folder, name: str, keeps: int | None) -> None:
    file = folder.open()
    keep(file, random_page(1))
    file.close()
    path = folder.path / name
    if keeps is None:
        path.unlink()
    else:
        os.truncate(path, keeps if keeps >= 0 else path.stat().st_size - 1)
    file = folder.open()
    assert not file.table.any()
    keep(file, random_page(2))


def test_the_files_are_sparse_and_private_to_their_owner(folder: Folder) -> None:
    file = folder.open(page_bytes=1 << 20, slots=1000)
    table, pages = folder.path / "model.table", folder.path / "model.pages"
    assert [path.stat().st_mode & 0o777 for path in (folder.path, table, pages)] == [0o700, 0o600, 0o600]
    assert (pages.stat().st_size, pages.stat().st_blocks) == (1000 << 20, 0)
    assert table.stat().st_size == 4096 + Tier.table_bytes(1000)
    assert table.stat().st_blocks * 512 >= table.stat().st_size, "a full disk would be a SIGBUS"
    assert file.table.nbytes == Tier.table_bytes(1000)


def test_two_owners_never_share_a_file(folder: Folder) -> None:
    file = folder.open()
    tier = keep(file, random_page(1))
    with pytest.raises(BlockingIOError):
        folder.open()
    assert tier.find(KEY) is not None and file.table.any()
    file.close()
    folder.open()


def test_a_file_removed_while_it_is_opened_is_made_again(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    first = folder.open()
    files = list(folder.path.iterdir())
    really_open = os.open

    def open_then_remove(path: Any, *args: int) -> int:
        fd = really_open(path, *args)
        first.close()
        while files:
            files.pop().unlink()
        return fd

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", open_then_remove)
        folder.open()
    assert sorted(path.name for path in folder.path.iterdir()) == ["model.pages", "model.table"]
    with pytest.raises(BlockingIOError):
        folder.open()


def test_a_failed_start_keeps_no_descriptor(folder: Folder) -> None:
    folder.open()
    before = open_descriptors()
    for _ in range(3):
        with pytest.raises(BlockingIOError):
            folder.open()
    assert open_descriptors() == before


def test_a_write_that_the_kernel_refuses_is_an_error_of_its_future_alone(folder: Folder) -> None:
    file = folder.open()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 * EXTENT, limits[1]))
    try:
        refused, written = file.write(2, random_page(2)), file.write(1, random_page(1))
        assert isinstance(refused.exception(), OSError)
        file.read(1, empty_page(), written.result()).result()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.read(2, empty_page(), file.write(2, random_page(2)).result()).result()


def test_a_disk_that_is_full_in_mid_page_fails_the_write(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder.open()
    really_write = os.pwritev

    def first_part_only(fd: int, buffers: list[memoryview], offset: int) -> int:
        if offset % EXTENT:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return really_write(fd, [buffers[0][:HOST_PAGE]], offset)

    monkeypatch.setattr(os, "pwritev", first_part_only)
    error = file.write(0, random_page(1)).exception()
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC


def test_a_page_that_the_kernel_moves_in_parts_arrives_whole(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder.open()
    really_write, really_read = os.pwritev, os.preadv
    parts: list[int] = []

    def write_part(fd: int, buffers: list[memoryview], offset: int) -> int:
        parts.append(offset)
        return really_write(fd, [buffers[0][:HOST_PAGE]], offset)

    def read_part(fd: int, buffers: list[memoryview], offset: int) -> int:
        parts.append(offset)
        return really_read(fd, [buffers[0][:HOST_PAGE]], offset)

    monkeypatch.setattr(os, "pwritev", write_part)
    monkeypatch.setattr(os, "preadv", read_part)
    page, into = random_page(1), empty_page()
    file.read(1, into, file.write(1, page).result()).result()
    assert np.array_equal(into, page)
    assert parts == [EXTENT, EXTENT + 4096, EXTENT + 8192] * 2


def test_several_are_in_flight_and_closing_waits_for_them(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    file = folder.open()
    really_write = os.pwritev
    all_in_flight = threading.Barrier(SLOTS)

    def write_together(fd: int, buffers: list[memoryview], offset: int) -> int:
        all_in_flight.wait(30)
        return really_write(fd, buffers, offset)

    monkeypatch.setattr(os, "pwritev", write_together)
    futures = [file.write(slot, random_page(slot)) for slot in range(SLOTS)]
    file.close()
    assert all(future.done() for future in futures)
    sums = [future.result() for future in futures]
    file = folder.open()
    into = [empty_page() for _ in range(SLOTS)]
    for future in [file.read(slot, into[slot], sums[slot]) for slot in range(SLOTS)]:
        future.result()
    assert all(np.array_equal(page, random_page(slot)) for slot, page in enumerate(into))


def test_a_filesystem_without_direct_io_works(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    really_open = os.open

    def open_through_cache(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return really_open(path, flags, mode)

    monkeypatch.setattr(os, "open", open_through_cache)
    file, page, into = folder.open(), random_page(1), empty_page()
    assert not file.direct
    file.read(1, into, file.write(1, page).result()).result()
    assert np.array_equal(into, page)


def test_wrong_slots_and_buffers_are_assertion_errors(folder: Folder) -> None:
    file = folder.open()
    with pytest.raises(AssertionError, match="slot 8 of 8"):
        file.write(SLOTS, random_page(1))
    with pytest.raises(AssertionError, match="for a slot"):
        file.write(0, random_page(1)[:PAGE_BYTES])
    with pytest.raises(AssertionError, match="not page-aligned"):
        file.write(0, empty_page(EXTENT + 1)[1:])


def test_the_last_bytes_of_the_disk_are_left_free(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    file, disk = folder.open(), os.statvfs(0)
    page = random_page(1)
    left = page_file.KEEP_FREE + EXTENT

    def statvfs(place: str | int) -> os.statvfs_result:
        fields = list(disk)
        fields[0:2], fields[4] = [1, 1], left  # f_bsize, f_frsize; f_bavail
        return os.statvfs_result(fields)

    monkeypatch.setattr(os, "statvfs", statvfs)
    expected = file.write(0, page).result()
    left -= 1
    with pytest.raises(OSError, match="64 MiB of the disk") as caught:
        file.write(1, page).result()
    assert caught.value.errno == errno.ENOSPC
    into = empty_page()
    file.read(0, into, expected).result()
    assert (into == page).all(), "what is there can be read"


def test_files_with_too_many_slots_are_overwritten(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_file, "MAX_SLOTS", 2 * SLOTS)
    folder.open(slots=2 * SLOTS + 1).close()
    assert folder.open(any_size=True).slots == SLOTS
    folder.opened[-1].close()
    folder.open(slots=2 * SLOTS).close()
    assert folder.open(any_size=True).slots == 2 * SLOTS


def test_allocated_bytes_are_those_of_the_written_slots(folder: Folder) -> None:
    assert allocated_bytes(str(folder.path), "model") == 0
    file = folder.open(slots=1000)
    before = allocated_bytes(str(folder.path), "model")
    file.write(3, random_page(1)).result()
    assert EXTENT <= allocated_bytes(str(folder.path), "model") - before < 100 * EXTENT
