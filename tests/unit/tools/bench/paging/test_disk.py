from __future__ import annotations

from pathlib import Path

from tools.bench.paging.disk import disk_rates


def test_rates_of_a_folder_and_nothing_left_there(tmp_path: Path) -> None:
    rates = disk_rates(tmp_path, 5000, pieces=11, in_flight=3)  # which is no multiple of what past the cache asks for
    assert rates.write > 0 and rates.read > 0
    assert not list(tmp_path.iterdir())
