"""The bench of speculation as a command, on the CPU with djinn-tiny: all its parts, at a small size."""

from __future__ import annotations

import subprocess
from pathlib import Path

import msgspec
import pytest

from tests.support.daemon import ROOT, clean_environ, warm_python
from tests.support.models import tiny_model
from tools.bench.harness.report import Report


@pytest.mark.long
def test_a_loop_takes_fewer_passes_with_speculation_and_other_text_as_many(tmp_path: Path) -> None:
    path = tmp_path / "found.json"
    work = ("--context=32", "--warm-up=8", "--tokens=33", "--runs=1", "--sessions=2", "--looks=2")
    command = [warm_python(), "-m", "tests.support.short_copies", "tools.bench.serving.speculation", str(tiny_model())]
    command += ["--device=cpu", "--memory=1GiB", f"--json={path}", *work, f"--draft={tiny_model()}", "--verify=3"]
    ran = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr

    found = msgspec.json.decode(path.read_bytes(), type=Report).results
    rates: dict[tuple[str, str], list[float]] = {}
    for row in found["rows"]:
        assert 0 < row["token_ms"] <= row["pass_ms"]
        rates.setdefault((row["speculation"], row["text"]), []).append(row["tokens_a_pass"])
    assert {len(some) for some in rates.values()} == {2}, "two turns"
    assert max(rates["auto", "loop"]) > 1.5  # how long guesses are depends on the times of steps
    assert max(rates["auto", "no repetition"]) < 1.2
    assert {*rates["off", "loop"], *rates["off", "no repetition"]} == {1.0}
    assert {text for way, text in rates if way == "with draft"} == {"loop", "no repetition", "agreed"}
    assert found["one_ms"] > 0 and len(found["looking_ms"]) == 2 and min(found["looking_ms"]) > 0
    assert found["verified_ms"] is None or found["verified_ms"] > 0  # guesses may seem too dear on a busy machine
