from __future__ import annotations

import os
from pathlib import Path

import pytest

from djinnd.device import cores


@pytest.fixture(autouse=True)
def of_sixteen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    monkeypatch.setattr(cores, "_GROUPS", tmp_path)


@pytest.mark.parametrize(("told", "found"), [("max 100000", 16), ("800000 100000", 8), ("50000 100000", 1), ("9", 16)])
def test_a_quota_of_time_counts_as_cores(told: str, found: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(told)
    assert cores.usable_cores() == found


@pytest.mark.parametrize(("quota", "found"), [("-1", 16), ("400000", 4), ("3200000", 16)])
def test_a_quota_of_the_older_control_groups_counts_too(quota: str, found: int, tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota)
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000")
    assert cores.usable_cores() == found


def test_without_control_groups_the_affinity_counts() -> None:
    assert cores.usable_cores() == 16
