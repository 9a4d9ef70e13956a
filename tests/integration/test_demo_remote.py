"""`make demo-remote` with the toy model. It needs network namespaces, which not every container has."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tools.two_machines import NamespacesRefused, expect_allowed

ROOT = Path(__file__).resolve().parents[2]
DEMO = [sys.executable, "-m", "tools.demo.remote", "--toy"]

pytestmark = [pytest.mark.long, pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")]


@pytest.fixture
def environ(tmp_path: Path) -> dict[str, str]:
    try:
        expect_allowed()
    except NamespacesRefused as refused:
        pytest.skip(str(refused))
    return os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tools'}", "TMPDIR": str(tmp_path)}


def test_the_demo_shows_each_scene_and_leaves_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    ran = subprocess.run(DEMO, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = " ".join(ran.stdout.split())
    for words in (
        "two network namespaces and a cable",
        "djinnctl token add laptop --url 10.83.0.1",
        "10.83.0.1 is trusted",
        "tokens were computed; the rest was there",
        "went to the host in",
        "t = s.fork()",
        'djinn.Session.load("talk.djinn")',
        's.steer("blocks.2"',
        "It waits at blocks.2; hit.activation is",
        "the weights, 7.1 MB, once",
        "a digest, because gpu has these weights",
        "[1, 10, 2048] logits, 81.9 kB",
        "nothing is left in shared memory",
    ):
        assert words in said, ran.stdout
    assert max(map(len, ran.stdout.splitlines())) < 80, "each line fits a terminal"
    assert not list(tmp_path.glob("djinnd-*"))


def test_ctrl_c_leaves_nothing(environ: dict[str, str], tmp_path: Path) -> None:
    with subprocess.Popen(DEMO, env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True) as demo:
        assert demo.stdout is not None
        assert any("what was said stays in the daemon" in line for line in demo.stdout), "the laptop talks to gpu"
        os.killpg(demo.pid, signal.SIGINT)
        demo.stdout.read()  # until no process has it any more, the daemon among them
        assert demo.wait() == 130
    assert not list(tmp_path.glob("djinnd-*"))
