"""The server's end of one principal's text worker, which answers questions in the order in which they were asked.

The first question that is not answered yet is the worker's job. A job that takes more CPU time than a limit, or far
more time by the clock, ends the worker: every question that waits is answered with the error, and the next question
starts another worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

from djinn_client.errors import DjinnError, ProtocolError, TextFailed, from_code
from djinnd.config import Limits
from djinnd.jobs import text as text_jobs
from djinnd.jobs.text import (
    MAX_ANSWER,
    MAX_QUESTION,
    Answer,
    BeginReading,
    EndReading,
    ForgetModel,
    Question,
    QuestionFailed,
    WorkerReady,
)
from djinnd.server.engines.commands import python_module
from djinnd.server.engines.metered_process import MeteredProcess

MOST_MODELS = 8  # tokenizers that a worker holds; the longest unused one goes first
_MOST_TOLD = 2000  # characters
_COMMAND = python_module("djinnd.text_worker")


class TextWorker(MeteredProcess):
    _event = "text_worker"
    _name = "the text worker"
    _doer = "the text worker"
    _error = TextFailed
    _start = 60.0
    _max_frame = MAX_ANSWER
    _max_output = MAX_QUESTION
    _job = "one job of the model's tokenizer or chat template"
    _limit = "limits.text"

    def __init__(
        self, user: int, limits: Limits, charge: Callable[[float], None], on_end: Callable[[TextWorker], None]
    ) -> None:
        super().__init__(_COMMAND, user, limits.text_memory, limits.text_seconds, charge, on_end)
        self.models: OrderedDict[int, None] = OrderedDict()  # that it has, or is about to have; the last used last
        self.readings = 0  # that have begun and have not ended
        self.used = time.monotonic()  # when it last had something to do
        self._jobs: deque[tuple[Question[Any], Callable[[Any], None]]] = deque()

    @property
    def is_idle(self) -> bool:
        return not self._jobs and not self.readings

    @property
    def _is_busy(self) -> bool:
        return bool(self._jobs)

    def ask(
        self, question: Question[Answer], then: Callable[[Answer | DjinnError], None], fds: Sequence[int] = ()
    ) -> None:
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
            self._started(message.lacking)
            if self._jobs:
                self._begin_job()
            return
        if not self._jobs or not isinstance(message, QuestionFailed | self._jobs[0][0].answers):
            return self._fail("the text worker has sent the daemon an answer to no question")
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

    def _over(self, error: DjinnError) -> None:
        super()._over(error)
        jobs, self._jobs = self._jobs, deque()
        for _, then in jobs:
            then(error)
