"""Processes that write pages to one file are killed at random moments: the pages that the next one finds are valid."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from djinnd.kvcache.page_file import PageFile
from djinnd.kvcache.tier import Tier
from tests.support.kept_pages import PAGE_BYTES, SLOTS, aligned, key, page

pytestmark = pytest.mark.smoke

KILLS = 8


def test_no_kill_leaves_a_page_that_differs_from_its_table(tmp_path: Path) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    for _ in range(KILLS):
        keeper = subprocess.Popen(
            [sys.executable, "-m", "tests.support.kept_pages", str(tmp_path), str(moments.randrange(2**32))],
            stdout=subprocess.PIPE,
        )
        with keeper:
            assert keeper.stdout is not None and keeper.stdout.readline() == b"keeping\n"
            time.sleep(moments.uniform(0, 0.1))  # any moment will do
            keeper.kill()
        assert check(tmp_path) > 0, "a keeper keeps more complete pages than it replaces"


def check(folder: Path) -> int:
    """Checks that each page matches its key. Returns the number of pages."""
    file = PageFile(str(folder), "model", PAGE_BYTES, SLOTS, "")
    try:
        tier = Tier(file.table, SLOTS)
        tier.check_integrity()
        into = aligned()
        for slot in tier.oldest(SLOTS):
            file.read(slot, into, tier.checksum(slot)).result()
            number = int.from_bytes(tier.key(slot), "little")
            assert tier.key(slot) == key(number) and (into == page(number)).all()
        return tier.used
    finally:
        file.close()
