from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from djinnd.server.handover.succession import inherited

ROOT = Path(__file__).parents[3]

# Replaces itself once, with the files named by its arguments as descriptors. Then reports what it was given.
ONCE = """
import json, os, sys
from djinnd.server.handover.succession import Inherited, inherited, succeed
given = inherited(os.environ)
if not given:
    os.environ["KEPT"] = "yes"
    extra = open(sys.argv[1])
    succeed([Inherited(f"file-{index}", os.open(path, os.O_RDONLY)) for index, path in enumerate(sys.argv[1:])][::-1])
open_fds = sorted(map(int, os.listdir("/proc/self/fd")))[:-1]
print(json.dumps({
    "pid": os.getpid(),
    "given": {name: os.read(fd, 100).decode() for name, fd in given},
    "numbers": [fd for _, fd in given],
    "inheritable": [os.get_inheritable(fd) for _, fd in given],
    "open": open_fds,
    "environ": {name: value for name, value in os.environ.items() if name.startswith(("LISTEN_", "KEPT"))},
    "flags": sys.flags.dev_mode,
}))
"""


@pytest.mark.parametrize("environ", [{}, {"LISTEN_PID": "1", "LISTEN_FDS": "1"}, {"LISTEN_FDS": "1"}])
def test_descriptors_for_another_process_are_not_inherited(environ):
    before = dict(environ)
    assert inherited(environ) == []
    assert environ == before


def test_the_successor_is_the_same_process_with_the_same_command_and_only_the_descriptors_for_it(tmp_path):
    files = [tmp_path / str(number) for number in range(4)]
    for file in files:
        file.write_text(f"this is {file.name}")
    command = [sys.executable, "-X", "dev", "-c", ONCE, *map(str, files)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        told = json.loads(process.communicate(timeout=60)[0])
    assert told == {
        "pid": process.pid,
        "given": {f"file-{number}": f"this is {number}" for number in reversed(range(4))},
        "numbers": [3, 4, 5, 6],
        "inheritable": [False] * 4,
        "open": [0, 1, 2, 3, 4, 5, 6],
        "environ": {"KEPT": "yes"},
        "flags": True,
    }


def test_descriptors_without_names(monkeypatch):
    """An old systemd passes no names."""
    monkeypatch.setattr(os, "set_inheritable", lambda fd, inheritable: None)
    assert inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "2"}) == [("", 3), ("", 4)]
