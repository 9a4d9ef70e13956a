"""Facts about models that the next daemon needs beside the configuration.

For a model that a user has brought: its owner, its users and its files. For any model: the chat template of its
load.

They are in a file of the state directory that only the daemon's user may read. A thread rewrites it when such a model
is loaded, gets another user or is forgotten.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

import msgspec

from djinnd.server.models.model import ServedModel
from djinnd.server.models.open_files import FileIdentity
from djinnd.server.system.whole_file import replace_file

log = logging.getLogger("djinnd.server")

NAME = "models.json"


class ModelRecord(msgspec.Struct, frozen=True):
    """The facts about one model. `owner` and `users` are None for a model of the configuration."""

    name: str
    folder: str
    owner: int | None
    users: list[int] | None
    files: dict[str, FileIdentity]
    template: str = ""  # chat template that came with its load

    @classmethod
    def of(cls, model: ServedModel) -> ModelRecord:
        if model.users is None:
            return cls(model.name, model.source.path, None, None, {}, model.template)
        return cls(model.name, model.source.path, model.owner, sorted(model.users), model.marks or {}, model.template)


class ModelRecords:
    """Reads and writes the file. `records` returns the models to write."""

    def __init__(self, state_dir: str, records: Callable[[], list[ModelRecord]]) -> None:
        self._path = Path(state_dir, NAME)
        self._records = records
        self._writing: asyncio.Task[None] | None = None
        self._changed = False

    def read(self) -> list[ModelRecord]:
        """The models of the daemon before; none if there is no such file, or it is damaged."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=list[ModelRecord])
        except FileNotFoundError:
            return []
        except (OSError, msgspec.DecodeError) as error:
            log.warning("model_records_lost path=%s error=%s", self._path, error)
            return []

    def changed(self) -> None:
        self._changed = True
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write())

    async def close(self) -> None:
        """Returns when the last change is written."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def _write(self) -> None:
        while self._changed:
            self._changed = False
            content = msgspec.json.encode(self._records())
            try:
                await asyncio.to_thread(replace_file, self._path, content)
            except OSError as error:
                log.warning("model_records_not_written path=%s error=%s", self._path, error)
