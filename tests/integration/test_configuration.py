"""`djinnd --check-config`, and the precedence of the sources of a setting."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import yaml

from tests.support.daemon import ROOT, clean_environ

GOOD = """\
memory: 3GiB
limits:
  session_grace: 300s
  handshake: 2s
models:
  mine:
    path: /srv/mine
    kv: 64MiB
"""
BAD = """\
memory: 3 parsecs
limits:
  sesion_grace: 5min
  sessions: 0
models:
  mine:
    dtype: float8
"""


def check(file: Path, *flags: str, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "djinnd", "--check-config", "--config", str(file), *flags],
        env=clean_environ() | environ,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_effective_values_and_their_sources_are_shown(tmp_path: Path) -> None:
    file = tmp_path / "djinnd.yaml"
    file.write_text(GOOD)
    shown = check(file, "--socket", "/tmp/flag", DJINND_SOCKET="/tmp/env", DJINND_LIMITS_HANDSHAKE="3s")
    assert (shown.returncode, shown.stderr) == (0, "")
    values = yaml.safe_load(shown.stdout)
    assert values["memory"] == "3GiB"
    assert values["socket"] == "/tmp/flag"
    assert (values["limits"]["handshake"], values["limits"]["session_grace"]) == ("3s", "300s")
    assert values["models"]["mine"]["path"] == "/srv/mine"
    origins = {line.split(":")[0]: line.split("# ")[1] for line in shown.stdout.splitlines() if "# " in line}
    assert origins["socket"] == "--socket"
    assert origins["  handshake"] == "DJINND_LIMITS_HANDSHAKE"
    assert origins["  session_grace"] == f"{file}:3"
    assert origins["  sessions"] == "default"

    file.write_text(shown.stdout)  # the output is a valid configuration
    assert yaml.safe_load(check(file).stdout) == values


def test_faults_are_named_with_their_lines(tmp_path: Path) -> None:
    file = tmp_path / "djinnd.yaml"
    file.write_text(BAD)
    refused = check(file, DJINND_DEVICE="abacus")
    assert (refused.returncode, refused.stdout) == (1, "")
    faults = [(1, "parsecs"), (3, "did you mean session_grace?"), (4, "sessions"), (7, "no path"), (7, "float8")]
    for line, words in faults:
        assert any(f"{file}:{line}: " in said and words in said for said in refused.stderr.splitlines()), words
    assert "DJINND_DEVICE" in refused.stderr
    assert check(tmp_path / "nowhere.yaml").returncode == 1
