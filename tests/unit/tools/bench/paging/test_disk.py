from __future__ import annotations

from pathlib import Path

from tools.bench.paging.disk import disk_rates


def test_a_folders_rates_are_measured_and_no_file_is_left(tmp_path: Path) -> None:
    rates = disk_rates(tmp_path, 5000, pieces=11, in_flight=3)  # not a multiple of direct I/O's alignment
    assert rates.write > 0 and rates.read > 0
    assert not list(tmp_path.iterdir())
