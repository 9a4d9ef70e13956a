"""`python -m djinnd.text_worker`: the server starts it for one principal and holds the other end of the socket."""

from __future__ import annotations

import argparse
import os
import signal
import socket
from contextlib import suppress

from djinnd import text_jobs
from djinnd.confinement import sandbox
from djinnd.confinement.channel import Channel
from djinnd.text_worker.serving import Serving, rehearse

_NICE = 10  # engines and the server come first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="Connected stream socket to the server.")
    parser.add_argument("--parent", type=int, required=True, help="The server's pid: this process ends when it does.")
    parser.add_argument("--user", type=int, required=True, help="The principal; where it can, it becomes that user.")
    parser.add_argument("--memory", type=int, required=True, help="Bytes that tokenizers and texts may take.")
    given = parser.parse_args()
    sandbox.tie_to(given.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server
    os.closerange(3, given.fd)
    os.closerange(given.fd + 1, os.sysconf("SC_OPEN_MAX"))
    os.nice(_NICE)
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # where the machine's memory ends, this goes first
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the sandbox lets it start no thread
    rehearse()
    decode = text_jobs.decode_to_worker
    channel = Channel(socket.socket(fileno=given.fd), text_jobs.MAX_QUESTION, decode, text_jobs.encode)
    lacking = sandbox.missing()
    if lacking:  # the tokenizers are memory-safe code, and what bounds them holds without the sandbox
        sandbox.limit(given.memory)
    else:
        sandbox.close(given.user, given.parent, given.memory)
    channel.send(text_jobs.Ready(lacking))
    Serving().serve(channel)


if __name__ == "__main__":
    main()
