"""The engine's end of a grammar process. Requests never wait; answers are read when they have come."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from djinn_client.errors import ProtocolError
from djinn_client.protocol import FrameDecoder
from djinn_client.transport.shm import SEALS
from djinnd.confinement.cpu import cpu_seconds
from djinnd.engine.tuning import GRAMMAR_ENDS_IN, GRAMMAR_STARTS_IN
from djinnd.jobs.grammar import (
    MAX_FRAME,
    SLOTS,
    GrammarStates,
    ToProcess,
    TryTokens,
    decode_to_engine,
    encode,
    words_of,
)

_READ = 1 << 18
_THREADS = max(1, min(8, len(os.sched_getaffinity(0)) // 2))  # that compute masks, of one principal


class GrammarProcess:
    """Belongs to the engine's thread. `failure`: the reason why it can no longer be used; "": it can. `fd`: readable
    when an answer has come."""

    def __init__(
        self, tokenizer: int, eos: Sequence[int], vocab: int, seconds: float, memory: int, *, is_table: bool
    ) -> None:
        """`tokenizer`: a descriptor, which stays the caller's. `seconds`: that one answer may take. Starting it takes
        a millisecond or two. Raises OSError."""
        self.failure = ""
        self.free = list(range(SLOTS - 1, -1, -1))  # slots
        self.idle_since = time.monotonic()
        words = words_of(vocab)
        masks = os.memfd_create("djinn-masks", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        ours, theirs = socket.socketpair()
        try:
            os.ftruncate(masks, SLOTS * words * 4)
            fcntl.fcntl(masks, fcntl.F_ADD_SEALS, SEALS)  # or the process could take away what the engine reads
            self.masks: npt.NDArray[np.uint32] = np.frombuffer(
                mmap.mmap(masks, SLOTS * words * 4, prot=mmap.PROT_READ), np.uint32
            ).reshape(SLOTS, words)
            command = [sys.executable, "-P", "-m", "djinnd.grammars", "--parent", str(os.getpid())]
            command += ["--fd", str(theirs.fileno()), "--masks", str(masks), "--vocab", str(vocab)]
            command += ["--tokenizer", str(tokenizer), "--eos", *map(str, eos), "--memory", str(memory)]
            command += ["--threads", str(_THREADS), *(["--table"] if is_table else [])]
            self._process = subprocess.Popen(  # in the engine's process group, with which the server kills an engine
                command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno(), masks, tokenizer]
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
            os.close(masks)
        ours.setblocking(False)
        self._socket = ours
        self._decoder = FrameDecoder(MAX_FRAME)
        self._unsent = bytearray()
        self._seconds = seconds
        self._has_spoken = False
        self._used = 0.0  # CPU seconds
        self._unanswered: dict[int, float] = {}  # runs with a pending state, and since when
        self._trying = TryTokens(0, [])  # the last one that was sent

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    def ask(self, message: ToProcess, runs: Sequence[int] = ()) -> None:
        """Sends a message. The answer will be the states of `runs`."""
        self._unanswered.update(dict.fromkeys(runs, time.monotonic()))
        if isinstance(message, TryTokens):
            self._trying = message
        self._unsent += encode(message)
        self._send()

    def forget(self, run: int) -> None:
        """Ignores the run's state if it still comes."""
        self._unanswered.pop(run, None)

    def read_answers(self) -> GrammarStates:
        """Reads the answers that have come, without waiting. Leaves out answers about runs that the process was not
        asked about."""
        if self._unsent:
            self._send()
        heard = GrammarStates()
        try:
            while data := self._socket.recv(_READ):
                for frame in self._decoder.feed(data):
                    said = decode_to_engine(frame.payload)
                    heard.plain += self._answered(said.plain)
                    heard.others += [state for state in said.others if self._answered([state.run])]
                    heard.tried += self._tried(said)
                if len(data) < _READ:
                    break
            else:
                self._fail(f"the grammar process {self._end()}")
        except BlockingIOError:
            pass
        except (OSError, ProtocolError) as error:
            self._fail(f"the grammar process {self._end()} ({error})")
        return heard

    def _answered(self, runs: list[int]) -> list[int]:
        """Keeps the runs that an answer was due for. Other runs have ended, or belong to another process."""
        self._has_spoken = True
        return [run for run in runs if self._unanswered.pop(run, None) is not None]

    def _tried(self, said: GrammarStates) -> list[tuple[int, int]]:
        """Keeps counts of masks that were asked for by the last Try."""
        if not said.tried or said.step != self._trying.step:
            return []
        lent = {run: len(slots) for run, _, slots in self._trying.guesses}
        return [(run, count) for run, count in said.tried if 0 <= count <= lent.get(run, -1)]

    def check(self, now: float) -> None:
        """Marks the process as failed if an answer has taken too long."""
        since = min(self._unanswered.values(), default=now)
        limit = self._seconds + (0.0 if self._has_spoken else GRAMMAR_STARTS_IN)
        if now - since > limit:
            self._fail(f"a grammar took more than {self._seconds:g} s (limits.text_seconds)")

    def take_seconds(self) -> float:
        """CPU time that the process has used since the last call of this."""
        before, self._used = self._used, cpu_seconds(self._process.pid) or self._used
        return self._used - before

    def kill(self) -> None:
        self._process.kill()
        self._socket.close()

    def wait(self) -> None:
        """Called after `kill`. Waits a few milliseconds until the process is gone."""
        self._process.wait()

    @property
    def is_gone(self) -> bool:
        """True if the process has ended. Called after `kill`, until it has."""
        return self._process.poll() is not None

    def _send(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            pass
        except OSError as error:
            self._fail(f"the grammar process {self._end()} ({error})")

    def _fail(self, failure: str) -> None:
        self.failure = self.failure or failure

    def _end(self) -> str:
        """How it has ended. Its socket is closed a moment before it is gone."""
        try:
            status = self._process.wait(GRAMMAR_ENDS_IN)
        except subprocess.TimeoutExpired:
            return "has closed its connection"
        return f"was ended by signal {-status}" if status < 0 else f"ended with status {status}"
