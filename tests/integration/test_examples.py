"""The examples run on a daemon with default settings and show what they announce."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import djinn_client as djinn
from tests.support.daemon import Daemon, clean_environ, lacks_tiers, wait_for, warm_python

EXAMPLES = Path(__file__).parents[2] / "tools" / "examples"


def told_by(name: str, daemon: Daemon) -> str:
    ran = subprocess.run(
        [warm_python(), str(EXAMPLES / name)],
        env=clean_environ() | {"DJINND_ADDRESS": daemon.address},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert djinn.sessions(address=daemon.address) == []
    return ran.stdout


def test_steering(daemon: Daemon) -> None:
    told = told_by("steering.py", daemon)
    steered = [float(part) for part in re.findall(r"of it: +([\d.]+)%", told)]
    assert len(steered) == 5 and steered[0] < 5 and steered[-1] > 50
    assert "' cls" in told.splitlines()[5]
    projected, alone = (float(part) for part in re.findall(r"(?:out|alone): +([\d.]+)%", told))
    assert projected < alone / 2


def test_logit_lens(daemon: Daemon) -> None:
    rows = {line[:26].strip(): line[26:] for line in told_by("logit_lens.py", daemon).splitlines()[1:11]}
    assert list(rows) == [
        "hook_embed",
        *(f"blocks.{block}.hook_resid_post" for block in range(8)),
        "the model itself",
    ]
    assert rows["blocks.7.hook_resid_post"] == rows["the model itself"] != rows["hook_embed"]
    assert "' source'" in rows["the model itself"] and "' source'" not in rows["hook_embed"]


def test_the_agent_example_moves_its_pages_and_forks(daemon: Daemon) -> None:
    with daemon.client() as client:
        wait_for(lambda: not any(map(lacks_tiers, client.models())))  # else its pages have nowhere to go
    told = told_by("agent.py", daemon)
    before, meanwhile = re.findall(r"search\w*: (\d+) pages on the device, (\d+) on the host", told)
    assert int(before[0]) > 1 and sum(map(int, meanwhile)) > 0
    assert re.search(r"^why: \w", told, re.MULTILINE) and "found: textwrap.shorten" in told
    tokens, computed = (int(part) for part in re.findall(r"of (\d+) tokens (\d+) were computed", told)[0])
    assert computed < 100 < tokens
    tried = {text: float(part) for part, text in re.findall(r"(-[\d.]+) a token: (.*)", told)}
    assert len(tried) == 2 and f"its answer: {max(tried, key=lambda text: tried[text])}" in told


def test_activation_patching(daemon: Daemon) -> None:
    told = told_by("activation_patching.py", daemon)
    table = [[int(part) for part in re.findall(r"(-?\d+)%", line)] for line in told.splitlines()[-8:]]
    assert len(table) == 8 and len({len(row) for row in table}) == 1
    assert table[0][0] > 80 and abs(table[-1][0]) < 20  # at first the difference lies in the changed token,
    assert abs(table[0][-1]) < 20 and table[-1][-1] == 100  # in the end at the place of the answer
