"""The files of one load, plan or image. Opening, reading and closing them delays no other job."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial

from djinn_client.files.model_files import ModelFiles
from djinnd.engine.load.turns import DeviceTurn
from djinnd.messages import DescribeImage, Load, Plan
from djinnd.weights.checkpoint import CheckpointFiles
from djinnd.weights.opening import open_checkpoint
from djinnd.weights.reading import Patience, Readers, Wait

WithFiles = Load | Plan | DescribeImage


class JobFiles:
    """Used by the job's thread. `look` is called from time to time while the thread waits, and may raise."""

    def __init__(self, job: WithFiles, turn: DeviceTurn, look: Callable[[], None]) -> None:
        self._job = job
        self._turn = turn
        self._look = look
        self._files: ModelFiles | None = None

    def checkpoint(self) -> CheckpointFiles:
        """Opens the checkpoint and reads its headers. Raises DjinnError, and the errors of `look`."""
        with self.reading() as wait:
            readers = Readers(1, "djinn-open")
            try:
                self._files = self._open(readers, wait)
                has_weights = self._job.shared is None
                act = partial(open_checkpoint, self._files, has_weights=has_weights)
                checkpoint: CheckpointFiles = wait(readers.submit(act))
                return checkpoint
            finally:
                readers.close()

    def _open(self, readers: Readers, wait: Wait) -> ModelFiles:
        opening = readers.submit(partial(open_files, self._job))
        try:
            files: ModelFiles = wait(opening)
        except BaseException:
            opening.add_done_callback(close_opened)  # close the files if they are opened after the wait has ended
            raise
        return files

    @contextmanager
    def reading(self) -> Iterator[Wait]:
        """Context for reads. The job has its turn before and after it, and keeps it in between as long as bytes come
        fast."""
        files = self._files
        patience = Patience((lambda: files.bytes_read) if files else (lambda: 0), self._look, self._turn.give_way)
        try:
            yield patience.result
        finally:
            self._turn.take()

    def close(self) -> None:
        """May block for as long as the file system does."""
        files, self._files = self._files, None
        if files is not None:
            files.close()
        close_descriptors(self._job)


def open_files(job: WithFiles) -> ModelFiles:
    """Opens the files that came with the job, or the files at its path."""
    if not job.files:
        return ModelFiles.open(job.path)
    fds, job.fds = job.fds, []
    return ModelFiles.handed_over(job.path, job.files, fds, job.others)


def close_opened(opening: Future[ModelFiles]) -> None:
    if not opening.cancelled() and opening.exception() is None:
        opening.result().close()


def close_descriptors(job: WithFiles) -> None:
    """Closes the descriptors of a job whose files were not opened."""
    fds, job.fds = job.fds, []
    for fd in fds:
        os.close(fd)
