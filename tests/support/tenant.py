"""A tenant of the daemon in its own process: `python -m tests.support.tenant ADDRESS SESSIONS [--endless]`.

It opens the sessions, prints `open` and waits for a line. Then it reads from their streams in turn, so that all run at
once. After TOKENS tokens of each it prints the tokens as JSON and closes the sessions. With --endless it prints
`streaming` when each has sent something, and reads until it is killed. It needs djinn_client only.
"""

from __future__ import annotations

import json
import sys

import djinn_client as djinn

MODEL = "djinn-tiny"
TOKENS = 24
PROMPTS = ["def fibonacci(", "class Tree:\n    def", "import os\n", "for i in range(", "x = ", "return ", "# the ", "@"]
NO_END = 1900


def main(address: str, count: str, endless: str = "") -> None:
    sessions = [djinn.Session(MODEL, address=address) for _ in range(int(count))]
    print("open", flush=True)
    sys.stdin.readline()
    tokens = NO_END if endless else TOKENS
    streams = [
        session.stream(PROMPTS[place % len(PROMPTS)], max_tokens=tokens, ignore_eos=True)
        for place, session in enumerate(sessions)
    ]
    got: list[list[int]] = [next(stream).token_ids for stream in streams]
    if endless:
        print("streaming", flush=True)
    live = set(range(len(streams)))
    while live:
        for place in sorted(live):
            piece = next(streams[place], None)
            if piece is None:
                live.remove(place)
            else:
                got[place] += piece.token_ids
    for session in sessions:
        session.close()
    print(json.dumps(got), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
