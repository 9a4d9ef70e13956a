"""`python -m djinnd.text_worker`: the server starts it for one principal and holds the other end of the socket."""

from __future__ import annotations

import os

from djinnd.confinement.channel import ConfinedChannel
from djinnd.confinement.child import begin
from djinnd.jobs import text as text_jobs
from djinnd.text_worker.serving import TextService, rehearse


def main() -> None:
    child = begin(__doc__)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the sandbox lets it start no thread
    rehearse()
    channel = ConfinedChannel(child.server, text_jobs.MAX_QUESTION, text_jobs.decode_to_worker, text_jobs.encode)
    lacking = child.close_sandbox()  # tokenizers are memory-safe code, and what bounds them holds without the sandbox
    channel.send(text_jobs.WorkerReady(lacking))
    TextService().serve(channel)


if __name__ == "__main__":
    main()
