from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from djinnd.standard_streams import open_standard_streams
open_standard_streams()
names = [os.readlink(f"/proc/self/fd/{fd}") for fd in range(3)]
passed = [os.get_inheritable(fd) for fd in range(3)]
new = os.open("/", os.O_RDONLY)
sys.stderr.write("nobody reads this")
os.write(int(sys.argv[1]), repr((names, passed, new > 2, sys.stdin.read())).encode())
"""
NULL = "/dev/null"


@pytest.mark.parametrize("closed", ["<&-", "2>&-", "<&- 2>&-", "<&- >&- 2>&-", ""])
def test_a_closed_descriptor_is_opened_on_dev_null(closed: str) -> None:
    ours, theirs = os.pipe()
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", SCRIPT, str(theirs)]
    subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[theirs],
        check=True,
    )
    os.close(theirs)
    told = os.read(ours, 4096).decode()
    os.close(ours)
    assert told == repr(([NULL] * 3, [True] * 3, True, ""))


def test_open_descriptors_are_not_replaced() -> None:
    script = SCRIPT.replace("names = ", "print('still here', flush=True); names = ")
    done = subprocess.run([sys.executable, "-c", script, "2"], input="", capture_output=True, text=True, check=True)
    assert done.stdout == "still here\n"
    assert "pipe:" in done.stderr and NULL not in done.stderr
