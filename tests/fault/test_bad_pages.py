"""Damaged pages: flipped bits, files that were cut, garbage, another model's pages. The session's tokens stay the same
in each case. Damaged pages are computed again, and the log reports them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client.protocol import Tier
from djinnd.kvcache.tier import COMPLETE, HOST_PAGE, RECORD
from djinnd.server.arenas.header import HEADER_BYTES, Header
from tests.conftest import MODEL, DaemonStarter
from tests.support.daemon import SHM
from tests.support.lives import Lives
from tests.support.parameters import long_except

PROMPT = list(range(100, 700))
NEXT = 4
HOST_SLOTS, DISK_SLOTS, PAGE = 16, 32, 1 << 20
ROOM = {"kv": "16MiB", "host_kv": f"{HOST_SLOTS + 1}MiB", "disk_kv": f"{DISK_SLOTS}MiB"}
FINGERPRINT = slice(32, 96)  # of a table's header


def flip(file: Path, at: int) -> None:
    with file.open("r+b") as there:
        there.seek(at)
        (byte,) = there.read(1)
        there.seek(at)
        there.write(bytes([byte ^ 0x10]))


def complete(file: Path, start: int, slots: int) -> list[int]:
    """The complete slots, by the table that begins at `start`."""
    with file.open("rb") as there:
        there.seek(start)
        table = there.read(slots * RECORD.itemsize)
    return [slot for slot in range(slots) if table[slot * RECORD.itemsize] == COMPLETE]


def nothing(table: Path, pages: Path) -> None:
    """Does no harm: the case with which the others are compared."""


def bits_of_pages(table: Path, pages: Path) -> None:
    (*_, slot) = slots = complete(table, HOST_PAGE, DISK_SLOTS)
    assert len(slots) == 3
    flip(pages, slot * PAGE + 12345)


def cut_pages(table: Path, pages: Path) -> None:
    os.truncate(pages, PAGE + 5)


def garbage_in_the_header(table: Path, pages: Path) -> None:
    with table.open("r+b") as there:
        there.write(os.urandom(HOST_PAGE))


def garbage_in_the_records(table: Path, pages: Path) -> None:
    with table.open("r+b") as there:
        there.seek(HOST_PAGE)
        there.write(b"".join(COMPLETE.to_bytes(8, "little") + os.urandom(56) for _ in range(DISK_SLOTS)))


def the_bytes_of_other_pages(table: Path, pages: Path) -> None:
    """Exchanges the pages: each slot has a sound page that is not its own. All pages are exchanged, because full pages
    may be found on the device and are not read then."""
    slots = complete(table, HOST_PAGE, DISK_SLOTS)
    with pages.open("r+b") as there:
        held = [os.pread(there.fileno(), PAGE, slot * PAGE) for slot in slots]
        for slot, page in zip(slots, held[1:] + held[:1], strict=True):
            os.pwrite(there.fileno(), page, slot * PAGE)


def another_model(table: Path, pages: Path) -> None:
    with table.open("r+b") as there:
        there.seek(FINGERPRINT.start)
        there.write(b"f" * (FINGERPRINT.stop - FINGERPRINT.start))


class Speaker:
    """One session that generates the same tokens again and again."""

    def __init__(self, lives: Lives) -> None:
        self.lives = lives
        with djinn.Session(MODEL, address=lives.address) as s:
            said = s.generate(PROMPT, max_tokens=1 + NEXT, ignore_eos=True).token_ids
        session = djinn.Session(MODEL, address=lives.address)
        assert session.generate(PROMPT, max_tokens=1, ignore_eos=True).token_ids == said[:1]
        self.id, self.expected = session.id, said[1:]
        session.detach()

    def says(self, what: object) -> int:
        """Generates, and checks that the tokens are the same as always. Returns the number of tokens computed for
        it."""
        session = djinn.Session.attach(self.id, address=self.lives.address)
        session.unpause()
        answer = session.generate(max_tokens=NEXT, ignore_eos=True)
        assert answer.token_ids == self.expected, what
        session.truncate(len(PROMPT) + 1)
        session.detach()
        assert djinn.status(check=True, address=self.lives.address).integrity == []
        return answer.usage.computed_tokens

    def pause(self, tier: Tier) -> int:
        """Pauses the session. Returns the number of its pages on the tier."""
        return djinn.pause(self.id, tier, address=self.lives.address).pages


def files(lives: Lives) -> tuple[Path, Path]:
    """Paths of the table and of the pages."""
    (table,), (pages,) = (list((lives.state / "pages").glob(f"*.{kind}")) for kind in ("table", "pages"))
    return table, pages


def lost(lives: Lives) -> list[str]:
    return [line for line in lives.log.splitlines() if "page_lost" in line]


@pytest.mark.smoke
@pytest.mark.parametrize("harm", long_except((bits_of_pages,), (bits_of_pages, the_bytes_of_other_pages, cut_pages)))
def test_damage_on_disk_under_a_running_daemon(start_daemon: DaemonStarter, harm: Callable[[Path, Path], None]) -> None:
    """The daemon is a fresh one: if it knew how long the disk takes, it might compute pages instead of reading them."""
    lives = Lives(start_daemon, ROOM)
    speaker = Speaker(lives)
    assert speaker.pause("disk") == 3
    assert lost(lives) == []
    harm(*files(lives))
    assert speaker.says(harm) > 1
    assert " WARNING " in lost(lives)[-1] and "on disk" in lost(lives)[-1]


def test_damage_on_disk_between_two_daemons(start_daemon: DaemonStarter) -> None:
    """An unusable file is replaced without a message."""
    lives = Lives(start_daemon, ROOM)
    speaker = Speaker(lives)
    for harm in (nothing, cut_pages, garbage_in_the_header, another_model, garbage_in_the_records):
        assert speaker.pause("disk") == 3
        lives.stop()
        harm(*files(lives))
        lives.again()
        lives.wait_for_tiers()
        assert (speaker.says(harm) == 1) == (harm is nothing), harm


@pytest.mark.parametrize("then", ["is promoted", "goes to disk first"])
def test_a_flipped_bit_on_the_host(start_daemon: DaemonStarter, then: str) -> None:
    lives = Lives(start_daemon, ROOM)
    speaker = Speaker(lives)
    assert speaker.pause("host") == 3
    names = lives.now.shared_memory()
    lives.kill()
    (pages,) = [SHM / name for name in names if header_of(SHM / name).holds == "pages"]
    slots = complete(pages, HEADER_BYTES, HOST_SLOTS)
    assert len(slots) == 3
    flip(pages, HEADER_BYTES + 4096 + slots[1] * PAGE + PAGE // 3)
    lives.again()
    lives.wait_for_tiers()
    if then == "goes to disk first":  # the way over the disk must not make the bad page valid
        speaker.pause("disk")
    assert speaker.says(then) > 1
    assert " WARNING " in lost(lives)[-1] and "on the host have another checksum" in lost(lives)[-1]


def header_of(file: Path) -> Header:
    with file.open("rb") as there:
        return Header.unpack(there.read(HEADER_BYTES))
