from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.support.daemon import ROOT, clean_environ, warm_python
from tests.support.models import tiny_model
from tools.bench.harness.report import Report
from tools.bench.stream import host_rates
from tools.bench.stream.beside import ceiling_s
from tools.bench.stream.host_rates import HostRates


def test_the_ceiling_has_bus_and_host_busy_all_the_time() -> None:
    rates = HostRates(bus=55e9, bus_beside=49e9, host={1: 60e9}, host_beside={1: 56e9}, threads=14)
    assert ceiling_s(rates, round(5.24e9), 1, 0.75) == pytest.approx(0.0576, abs=1e-4)


@pytest.mark.parametrize("form", host_rates.FORMS)
def test_rates_are_measured_for_each_number_of_rows(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_rates, "COPY_BYTES", 1 << 20)
    rates = host_rates.measure(64, 128, "cpu", form)
    assert rates.host.keys() == rates.host_beside.keys() and 1 in rates.host
    assert all(rate > 0 for rate in (rates.bus, rates.bus_beside, *rates.host.values(), *rates.host_beside.values()))
    assert rates.bus_beside <= rates.bus


@pytest.mark.long
def test_the_command_measures_both_ways(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    command = [warm_python(), "-m", "tests.support.short_copies", "tools.bench.stream.beside", str(tiny_model())]
    command += ["--device=cpu", "--memory=512MiB", "--kv=16MiB", "--runs=1", "--tokens=9", "--context=32"]
    ran = subprocess.run(
        [*command, "--sessions=2", f"--json={path}"], cwd=ROOT, env=clean_environ(), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "host alone" in ran.stdout
    found = msgspec.json.decode(path.read_bytes(), type=Report).results
    assert [row["sessions"] for row in found["rows"]] == [2]
    assert all(row["ceiling_ms"] > 0 and row["both_ms"] > 0 for row in found["rows"])
    assert any("CPU beside the bus" in note for note in found["notes"])
