"""The bench of shaped links as a command, on the CPU with small sizes. Without network namespaces its links are not
measured, and it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from tests.support.daemon import ROOT, clean_environ
from tools.bench.harness.report import Report
from tools.two_machines import NamespacesRefused, expect_allowed

LINK = "1gbit,20ms"
SIZES = ("--rounds=1", "--tokens=32", "--vocabulary=2000", f"--link={LINK}")


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_local_client_loopback_and_a_shaped_link(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tools.bench.serving.remote_links", "--device=cpu", *SIZES]
    command.append(f"--json={tmp_path / 'found.json'}")
    ran = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    ways = msgspec.json.decode((tmp_path / "found.json").read_bytes(), type=Report).results["ways"]
    try:
        expect_allowed()
    except NamespacesRefused:
        assert "namespaces" in ways.pop(LINK)["not_measured"]
    else:
        assert ways[LINK]["logits_bytes"] < ways[LINK]["wire_bytes"] < 2 * ways[LINK]["logits_bytes"]
        assert ways[LINK]["call_s"] >= 0.02
    for figures in ways.values():
        assert figures["capture_bytes"] == 32 * 2048 * 16 * 4
        assert figures["tokens_per_s"] > 0 < figures["share_s"]
