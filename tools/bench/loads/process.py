"""A load in a process of its own, so that work on its tokens delays no session that is measured."""

from __future__ import annotations

import asyncio
import multiprocessing
from multiprocessing.connection import Connection
from types import TracebackType

import click

import djinn_client as djinn
from tools.bench.loads.course import Course
from tools.bench.loads.live import serve
from tools.bench.loads.load import Load

PATIENCE_S = 120.0  # until all sessions are open, and for the answers after the load's time


class LoadProcess:
    """The context begins when the load does. Leaving it before the load's end cancels the load."""

    def __init__(self, address: str, model: str, vocab: int, load: Load) -> None:
        context = multiprocessing.get_context("spawn")
        self._seconds = load.seconds
        self._ours, self._theirs = context.Pipe()
        self._process = context.Process(target=_ask, args=(self._theirs, address, model, vocab, load), daemon=True)

    def __enter__(self) -> LoadProcess:
        self._process.start()
        self._theirs.close()
        try:
            begun = self._receive(PATIENCE_S)
        except BaseException:
            self._end()
            raise
        assert begun is None, begun
        return self

    def course(self) -> Course:
        """Waits for the load's end and returns its course. Can be called once."""
        course = self._receive(self._seconds + PATIENCE_S)
        assert isinstance(course, Course)
        return course

    def _receive(self, timeout: float) -> object:
        """Receives a message of the process. Raises ClickException where the process has failed or sends nothing."""
        if not self._ours.poll(timeout):
            raise click.ClickException(f"a load's process has not answered for {timeout:.0f} s")
        try:
            answer = self._ours.recv()
        except EOFError:
            raise click.ClickException("a load's process has ended without an answer") from None
        if isinstance(answer, str):
            raise click.ClickException(f"beside: {answer}")
        return answer

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        self._process.terminate()
        self._process.join()
        self._ours.close()


def _ask(pipe: Connection, address: str, model: str, vocab: int, load: Load) -> None:
    """Runs in the load's process. Sends None when the load begins, then its course, or an error's message."""
    try:
        pipe.send(asyncio.run(serve(address, model, vocab, load, begun=lambda: pipe.send(None))))
    except djinn.DjinnError as error:
        pipe.send(error.message)
