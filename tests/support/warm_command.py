"""A fork of the warm process that runs a Python command line: `-m MODULE …` or `FILE …`. See warm_python.py.

It drops this repository's modules except its own imports, so the command finds the state of a Python that was just
started.
"""

from __future__ import annotations

import atexit
import gc
import json
import os
import runpy
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Sequence

MAX_PACKET = 1 << 17  # most bytes of a request
_OURS = ("djinnd", "djinn_client", "djinnctl", "tools", "tests")


def run(packet: bytes, fds: Sequence[int], caller: socket.socket, python: str) -> None:
    """`fds`: its standard streams. `python`: its sys.executable. `caller` learns its exit status."""
    arguments, environ, folder = json.loads(packet)
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    gc.enable()
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    sys.executable = python
    threading.Thread(target=_end_with, args=(caller,), daemon=True).start()
    status = [1]
    atexit.register(_end, caller, status)  # registered before the command's handlers, and so run after them
    status[0] = _status_of(arguments)


def _status_of(arguments: Sequence[str]) -> int:
    try:
        if arguments[0] == "-m":
            sys.path[0], sys.argv = os.getcwd(), list(arguments[1:])
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.path[0], sys.argv = os.path.dirname(os.path.abspath(arguments[0])), list(arguments)
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def _end(caller: socket.socket, status: Sequence[int]) -> None:
    """Ends at once: freeing memory that is shared with the warm process would copy it first."""
    sys.stdout.flush()
    sys.stderr.flush()
    caller.send(str(status[0]).encode())
    os._exit(status[0])


def _end_with(caller: socket.socket) -> None:
    """Ends the command when the caller is gone. Runs on a thread. No data is ever sent, so readable means closed."""
    if not caller.recv(1):
        os.kill(os.getpid(), signal.SIGKILL)
