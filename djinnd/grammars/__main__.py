"""`python -m djinnd.grammars`: an engine starts it for one principal and one model, and holds the other end of the
socket."""

from __future__ import annotations

import argparse
import mmap
import os
import resource
import signal
import socket
from contextlib import suppress

import msgspec
import numpy as np
from llguidance import LLTokenizer

from djinnd.confinement.channel import ConfinedChannel
from djinnd.grammars.serving import GrammarService
from djinnd.jobs import grammar as grammar_jobs
from djinnd.jobs.grammar import SLOTS, WORD, words_of
from djinnd.lifeline import tie_to
from djinnd.text.grammar import TokenTable, open_tokenizer, tokenizer_of


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--fd", type=int, required=True, help="Connected stream socket to the engine.")
    parser.add_argument("--parent", type=int, required=True, help="The engine's pid: this process ends when it does.")
    parser.add_argument("--masks", type=int, required=True, help="A memfd of SLOTS masks.")
    parser.add_argument("--vocab", type=int, required=True, help="Tokens that the model chooses from.")
    parser.add_argument("--tokenizer", type=int, required=True, help="An open tokenizer.json, or table of tokens.")
    parser.add_argument("--table", action="store_true", help="It is a table: see djinnd/text/grammar.py.")
    parser.add_argument("--eos", type=int, nargs="*", default=[], help="Tokens that end an output.")
    parser.add_argument("--memory", type=int, required=True, help="Bytes of data memory that this process may have.")
    parser.add_argument("--threads", type=int, required=True, help="Threads that compute masks.")
    given = parser.parse_args()
    tie_to(given.parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server
    resource.setrlimit(resource.RLIMIT_DATA, (given.memory, given.memory))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as score:
        score.write("1000")  # if the machine runs out of memory, this process is killed before the engine
    words = words_of(given.vocab)
    masks = np.frombuffer(mmap.mmap(given.masks, SLOTS * words * 4), np.uint32).reshape(SLOTS, words)
    channel: ConfinedChannel[grammar_jobs.ToProcess, grammar_jobs.GrammarStates] = ConfinedChannel(
        socket.socket(fileno=given.fd), grammar_jobs.MAX_FRAME, grammar_jobs.decode_to_process, grammar_jobs.encode
    )
    tokenizer = _tokenizer(given.tokenizer, given.table, given.eos, WORD * words)
    GrammarService(tokenizer, given.vocab, masks, given.threads, channel).serve()


def _tokenizer(fd: int, is_table: bool, eos: list[int], room: int) -> LLTokenizer:
    """room: number of tokens in a slot's mask. Other processes share the descriptor's offset, so it is not moved."""
    content = os.pread(fd, os.fstat(fd).st_size, 0)
    os.close(fd)
    if is_table:
        return tokenizer_of(msgspec.msgpack.decode(content, type=TokenTable), eos, room)
    return open_tokenizer(content.decode(), eos, room)


if __name__ == "__main__":
    main()
