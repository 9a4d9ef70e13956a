"""The streaming bench as a command, on the CPU: all its parts except the peers that need CUDA."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.daemon import ROOT, clean_environ, warm_python
from tests.support.models import tiny_model
from tools.bench.harness.report import Report
from tools.bench.stream.outcome import Results, Status
from tools.bench.stream.served import Serving, measure

CONFIG = ROOT / "tools" / "bench" / "configs" / "cpu-smoke.yaml"
BENCH = ("tests.support.short_copies", "tools.bench.stream")


@pytest.mark.long
def test_the_command_prints_a_table_and_writes_json(tmp_path: Path) -> None:
    chosen = [f"--only={name}" for name in ("resident", "plain", "packed", "gpu-only", "accelerate")]
    command = [warm_python(), "-m", *BENCH, str(CONFIG), f"--json={tmp_path / 'found.json'}", *chosen]
    ran = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "2 + 0 + 4" in ran.stdout and "bit for bit" in ran.stdout

    report = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=Report)
    results = msgspec.convert(report.results, Results, strict=False)
    assert results.ceiling > 0 and results.memory_rate > 0
    assert results.contenders.pop("accelerate").status is Status.SKIPPED
    plain, packed = (results.contenders[name].found for name in ("plain", "packed"))
    assert plain is not None and packed is not None
    assert (plain.resident_blocks, plain.streamed_blocks) == (2, 4)
    assert packed.streamed_bytes < 0.8 * plain.streamed_bytes
    assert set(plain.step_s) == {1, 3}
    for name, outcome in results.contenders.items():
        assert outcome.status is Status.MEASURED, f"{name}: {outcome.note}"
        assert outcome.equality is not None and outcome.equality.last_argmax
        assert outcome.equality.as_resident is (True if name in ("plain", "packed") else None)


@pytest.mark.long
def test_weights_handed_over_by_a_client(tmp_path: Path) -> None:
    """They are on no disk, and stream like those of a checkpoint."""
    shared = tmp_path / "shared.yaml"
    shared.write_text(CONFIG.read_text() + "weights: shared\ncontenders: [resident, packed]\n")
    command = [warm_python(), "-m", *BENCH, str(shared), f"--json={tmp_path / 'found.json'}"]
    ran = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    report = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=Report)
    contenders = msgspec.convert(report.results, Results, strict=False).contenders
    packed = contenders["packed"].found
    assert packed is not None and packed.streamed_blocks == 4 and packed.streamed_bytes > 0
    assert contenders["packed"].equality is not None and contenders["packed"].equality.as_resident


def test_a_budget_that_is_too_small_is_reported_with_the_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", warm_python())  # for the daemon
    settings = {"path": str(tiny_model()), "kv": "4GiB"}
    served = measure(Serving("cpu", "512MiB", settings, 1024, 16, 2, {1: 16}, 1, True), print)
    assert served.outcome.status is Status.OUT_OF_MEMORY and "512.0 MiB is free" in served.outcome.note
    assert served.logits is None
