"""The benches of paging as commands, on the CPU with djinn-tiny: all their parts, at a small size."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.daemon import ROOT, clean_environ, warm_python
from tests.support.models import tiny_model
from tools.bench.harness.report import Report


def bench(name: str, path: Path, *options: str) -> tuple[str, dict[str, Any]]:
    """Runs a bench. Returns its output and its results."""
    command = [warm_python(), "-m", "tests.support.short_copies", f"tools.bench.{name}"]
    command += [str(tiny_model()), "--device=cpu", f"--json={path}"]
    ran = subprocess.run([*command, *options], cwd=ROOT, env=clean_environ(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout, msgspec.json.decode(path.read_bytes(), type=Report).results


@pytest.mark.long
@pytest.mark.timeout(300)
def test_paging_between_all_tiers(tmp_path: Path) -> None:
    small = ("--memory=512MiB", "--tokens=512", "--rounds=1", "--forks=5", "--steps=64")
    shown, found = bench("paging.kv", tmp_path / "kv.json", *small, f"--folder={tmp_path}")
    assert "token of one on the host (copied)" in shown and "token of one computed anew (computed)" in shown
    assert found["tokens"] == 512 and found["session_bytes"] == 2 * found["page_bytes"]
    assert [one["computed"] for one in found["from_host"] + found["when_expected"]] == [1, 1]
    assert [one["computed"] for one in found["recomputed"]] == [513]
    assert found["forks"]["pages_of_many"] == 5
    moved = {phase: noticed["sessions_moved"] for phase, noticed in found["beside"].items()}
    assert moved["undisturbed"] == 0 < moved["each_second"] and moved["disturbed"] > 0
    assert found["beside"]["disturbed"]["bytes_up"] > 0 == found["beside"]["undisturbed"]["bytes_up"]
    assert all(0 < noticed["median"] <= noticed["p99"] for noticed in found["beside"].values())
    assert found["ceilings"]["both"] > 0 and found["ceilings"]["disk"]["write"] > 0
    assert [file.name for file in tmp_path.iterdir()] == ["kv.json"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_more_sessions_than_fit_and_the_same_with_room(tmp_path: Path) -> None:
    work = ("--sessions=6", "--context=300", "--new=4", "--turns=1")
    sizes = ("--memory=512MiB", "--room=512MiB", "--kv=7MiB", "--host-kv=32MiB", "--disk-kv=32MiB")
    shown, found = bench("paging.oversubscribe", tmp_path / "found.json", *work, *sizes)
    assert "one after another" in shown and "all at once" in shown
    assert found["demand"]["kv_bytes"] > found["model"]["kv_bytes"] and found["groups"] == 1
    assert found["findings"] == []
    for mode in found["modes"].values():
        assert mode["served"] == mode["sessions"] == 6, mode["failures"]
        assert mode["unlike_though_kept"] == 0 and mode["failures_with_room"] == []
    points = found["usage"]["one after another"]
    assert points[-1]["host"] > 0 and points[-1]["logical"] > points[0]["logical"]


@pytest.mark.long
@pytest.mark.timeout(300)
def test_agents_that_wait_for_their_tools(tmp_path: Path) -> None:
    work = ("--crowd=4x300", "--loops=1", "--arrivals=2", "--context=300", "--answer=3", "--ways=none,expected")
    sizes = ("--memory=512MiB", "--kv=4MiB", "--host-kv=32MiB", "--disk-kv=0")
    shown, found = bench("agents", tmp_path / "found.json", *work, *sizes, "--time-scale=0.02")
    assert "4 agents alive at once" in shown and "2 agents arriving" in shown
    crowd, arrivals = found["tried"]
    for tried, wanted in ((crowd, 4), (arrivals, 4)):
        for run in tried["ways"].values():
            assert run["answers"] == run["wanted"] == wanted, run["failures"]
            assert 0 < run["wake_up"]["p50"] <= run["wake_up"]["worst"] and run["tokens_per_s"] > 0
    assert crowd["ways"]["none"]["alive_most"] == 4
    assert crowd["usage"]["expected"][-1]["arrived"] > 0  # four sessions of two pages, and a pool of three pages
    assert found["findings"] == [] and found["peer"] is None


@pytest.mark.long
@pytest.mark.timeout(300)
def test_continuing_a_session_beside_its_peers(tmp_path: Path) -> None:
    shown, found = bench("paging.resume", tmp_path / "found.json", "--memory=512MiB", "--tokens=256", "--rounds=1")
    assert "recompute" in shown and "expected" in shown
    (session,) = found["sessions"]
    assert session["same_token"] and session["copied"]
    assert session["moved"] >= session["nbytes"] > 0
    assert all(session[way][0] > 0 for way in ("recompute", "manual", "djinnd", "expected"))
