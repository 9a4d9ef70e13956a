"""`python -m djinnd.functions`: the server starts it, for one tenant, and holds the other end of the socket."""

from __future__ import annotations

import argparse
import os
import signal
import socket
import tempfile
from contextlib import suppress

from djinnd import interventions
from djinnd.confinement import sandbox

_NICE = 10  # engines come first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="Connected stream socket to the server.")
    parser.add_argument("--parent", type=int, required=True, help="The server's pid: this process ends when it does.")
    parser.add_argument("--user", type=int, required=True, help="Whose functions: where it can, it becomes that user.")
    parser.add_argument("--memory", type=int, required=True, help="Bytes that they may take.")
    given = parser.parse_args()
    sandbox.tie_to(given.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server
    os.closerange(3, given.fd)
    os.closerange(given.fd + 1, os.sysconf("SC_OPEN_MAX"))
    os.nice(_NICE)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where the machine's memory ends, this goes first

    import cloudpickle  # noqa: F401  # what functions are unpickled with
    import torch

    from djinnd.functions.serving import Serving, channel_to_server, rehearse

    tempfile.tempdir = "/tmp"  # parts of torch ask for its name when they are imported; nobody can write there
    torch.set_num_threads(1)
    torch.set_num_interop_threads(1)
    rehearse()
    channel = channel_to_server(socket.socket(fileno=given.fd))
    lacking = sandbox.missing()
    if lacking:
        channel.send(interventions.Unfit(lacking))
        return
    sandbox.close(given.user, given.parent, given.memory)
    channel.send(interventions.Ready())
    Serving(given.memory).serve(channel)


if __name__ == "__main__":
    main()
