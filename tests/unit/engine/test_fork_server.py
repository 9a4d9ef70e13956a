from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.support.models import REPOSITORY

# Imports what the fork server imports, reports whether it may fork, and then imports what an engine imports.
CODE = """
import json, os, random, sys
from djinnd.engine.fork_server import LIBRARIES, import_libraries, reseed, unfit
before = dict(os.environ)
import_libraries(LIBRARIES)
assert dict(os.environ) == before
reason, libraries = unfit(), sorted(sys.modules)
print(json.dumps([reason, libraries]), flush=True)
import numpy, torch
for _ in range(2):
    if not os.fork():
        reseed()
        print(json.dumps([torch.rand(1).item(), numpy.random.rand(), random.random()]), flush=True)
        os._exit(0)
    os.wait()
import djinnd.engine.__main__, djinnd.engine.engine, djinnd.device.cpu, djinnd.device.cuda
print(json.dumps(sorted(sys.modules)))
"""


@pytest.mark.long
def test_the_libraries_may_be_forked_and_cover_an_engine_s_imports() -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "OPENBLAS_"))}
    told = subprocess.run([sys.executable, "-c", CODE], cwd=REPOSITORY, env=environ, capture_output=True, check=True)
    (reason, libraries), one, other, modules = map(json.loads, told.stdout.splitlines())
    assert reason == ""
    assert not [name for name in libraries if name.startswith(("djinnd.model", "djinnd.device", "djinnd.weights"))]
    more = {name.partition(".")[0] for name in set(modules) - set(libraries)}
    assert not more & {"torch", "transformers", "triton", "safetensors", "click"}
    assert not set(one) & set(other), "forks draw numbers of their own"


ORPHAN = """
import atexit, os
from djinnd.jobs.fork_server import ForkProcess
from djinnd.engine.fork_server import ForkedChild
atexit.register(print, "an interpreter's way out", flush=True)
ForkedChild(ForkProcess(["no.such.module"], {}, {}), 0, parent=os.getpid()).run()
"""


def test_a_forked_child_without_its_fork_server_exits_at_once() -> None:
    """It does not free the shared memory first: that takes a moment in which the server could find the process."""
    ended = subprocess.run([sys.executable, "-c", ORPHAN], capture_output=True, text=True, cwd=REPOSITORY, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "the server is gone already\n")


def test_threads_and_open_devices_forbid_a_fork() -> None:
    code = (
        "import threading, time; from djinnd.engine.fork_server import unfit; print(unfit())\n"
        "threading.Thread(target=time.sleep, args=[30], daemon=True).start(); print(unfit())"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, check=True, text=True)
    fit, unfit = told.stdout.splitlines()
    assert fit == "" and unfit.startswith("importing the libraries has started 1 threads: python")
