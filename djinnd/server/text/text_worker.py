"""The server's end of one principal's text worker, which answers questions in the order in which they were asked.

The first question that is not answered yet is the worker's job. A job that takes more CPU time than a limit, or far
more time by the clock, ends the worker: every question that waits is answered with the error, and the next question
starts another worker.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from djinn_client.errors import DjinnError, ProtocolError, TextFailed, from_code
from djinnd.confinement.cpu import cpu_seconds
from djinnd.jobs import text as text_jobs
from djinnd.jobs.text import (
    MAX_ANSWER,
    MAX_QUESTION,
    A,
    BeginReading,
    EndReading,
    ForgetModel,
    Question,
    QuestionFailed,
    WorkerReady,
)
from djinnd.server.engines.confined_process import ConfinedProcess

log = logging.getLogger("djinnd.server")

WALL = 6  # times its CPU seconds, that a job may take by the clock: the machine may have others to run
MOST_MODELS = 8  # tokenizers that a worker holds; the longest unused one goes first
_MOST_TOLD = 2000  # characters


class TextWorker(ConfinedProcess):
    """`seconds`: CPU time of one job. `charge` is called with CPU seconds that the worker has used; `on_end` when it
    takes no more questions."""

    _event = "text_worker"
    _name = "the text worker"
    _doer = "the text worker"
    _error = TextFailed
    _start = 60.0

    def __init__(
        self,
        command: Sequence[str],
        environ: Mapping[str, str],
        user: int,
        memory: int,
        seconds: float,
        charge: Callable[[float], None],
        on_end: Callable[[TextWorker], None],
    ) -> None:
        super().__init__(command, environ, user, memory, MAX_ANSWER, MAX_QUESTION)
        self.models: OrderedDict[int, None] = OrderedDict()  # that it has, or is about to have; the last used last
        self.readings = 0  # that have begun and have not ended
        self.used = time.monotonic()  # when it last had something to do
        self._memory = memory
        self._seconds = seconds
        self._charge = charge
        self._on_end = on_end
        self._jobs: deque[tuple[Question[Any], Callable[[Any], None]]] = deque()
        self._began = self._cpu_began = 0.0  # of the first of them
        self._cpu = 0.0  # seconds that are charged
        self._watch: asyncio.TimerHandle | None = None

    @property
    def is_idle(self) -> bool:
        return not self._jobs and not self.readings

    def ask(self, question: Question[A], then: Callable[[A | DjinnError], None], fds: Sequence[int] = ()) -> None:
        """Sends a question. `then` is called once with the answer or the error, in a later turn of the loop. The
        descriptors are the connection's from now on."""
        if self._end is not None:
            asyncio.get_running_loop().call_soon(then, self._end)
            return
        self._jobs.append((question, then))
        self._connection.send(text_jobs.encode(question, len(fds)), fds)
        if len(self._jobs) == 1 and self._is_ready:
            self._begin_job()

    def tell(self, message: BeginReading | EndReading | ForgetModel) -> None:
        if self._end is None:
            self._connection.send(text_jobs.encode(message))

    def forget(self, model: int) -> None:
        if model in self.models:
            del self.models[model]
            self.tell(ForgetModel(model))

    def kill(self) -> None:
        self._kill(TextFailed("the text worker was ended: try again"))

    # --- jobs -------------------------------------------------------------------------------------------------------

    def frame(self, payload: bytes, fds: list[int]) -> None:
        try:
            message = text_jobs.decode_from_worker(payload)
        except ProtocolError as error:
            return self.broken(error)
        if isinstance(message, WorkerReady):
            return self._started(message)
        if not self._jobs or not isinstance(message, QuestionFailed | self._jobs[0][0].answers):
            return self._fail("the text worker has said to the daemon what nobody had asked")
        _, then = self._jobs.popleft()
        self._meter()
        if self._jobs:
            self._begin_job()
        self.used = time.monotonic()
        then(
            from_code(message.code, message.message[:_MOST_TOLD], {})
            if isinstance(message, QuestionFailed)
            else message
        )

    def _started(self, ready: WorkerReady) -> None:
        self._is_ready = True
        if ready.lacking:
            log.warning("text_worker_not_confined user=%d lacking=%s", self.user, ready.lacking)
        if self._jobs:
            self._begin_job()

    def _begin_job(self) -> None:
        self._began, self._cpu_began = time.monotonic(), self._cpu
        if self._watch is None:
            self._watch = asyncio.get_running_loop().call_later(self._seconds, self._look)

    def _look(self) -> None:
        """Ends the worker if its present job has taken too long. It may be a later job than when this was scheduled."""
        self._watch = None
        if not self._jobs or self._end is not None:
            return
        self._meter()
        cpu, wall = self._cpu - self._cpu_began, time.monotonic() - self._began
        if cpu >= self._seconds or wall >= self._seconds * WALL:
            self._kill(
                TextFailed(
                    f"the model's tokenizer or chat template took {cpu:.1f} s of CPU time, {wall:.1f} s by the clock, "
                    f"for one job: at most {self._seconds:g} s (limits.text_seconds), and {WALL} times that by the "
                    "clock",
                    limit=self._seconds,
                )
            )
            return
        rest = min(self._seconds - cpu, self._seconds * WALL - wall)
        self._watch = asyncio.get_running_loop().call_later(max(rest, 0.05), self._look)

    def _meter(self) -> None:
        """Charges the CPU time that the process has used since the last charge."""
        cpu = cpu_seconds(self._pid)
        if cpu is not None:
            self._charge(max(0.0, cpu - self._cpu))
            self._cpu = cpu

    def _over(self, error: DjinnError) -> None:
        self._meter()
        if self._watch is not None:
            self._watch.cancel()
        self._on_end(self)
        jobs, self._jobs = self._jobs, deque()
        for _, then in jobs:
            then(error)

    def _account(self, status: int) -> str:
        told = super()._account(status)
        if self._is_ready and status < 0:
            told += f". It may take {self._memory:,} bytes (limits.text_memory): a larger tokenizer or text ends so"
        return told
