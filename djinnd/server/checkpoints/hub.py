"""Downloads models from the hub. Each download runs in a process, which is killed when its time is over.

Loads of one id share its download. A download never waits for another one: a user that has too many is told to try
again later.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from contextlib import suppress
from subprocess import DEVNULL, PIPE

from djinn_client.errors import Busy, ModelNotFound
from djinnd.config import Limits
from djinnd.server.engines.commands import python_module

log = logging.getLogger("djinnd.server")


class Hub:
    """Owns the processes that download. `limits` may be replaced."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self._downloads: dict[str, asyncio.Task[str]] = {}
        self._users: Counter[int] = Counter()  # downloads by the user that began them

    async def folder(self, hub_id: str, user: int) -> str:
        """Downloads the model and returns its folder. Raises Busy, and ModelNotFound with the library's message."""
        download = self._downloads.get(hub_id)
        if download is None:
            self._expect_room(user)
            self._users[user] += 1
            download = self._downloads[hub_id] = asyncio.create_task(self._fetch(hub_id))
            download.add_done_callback(lambda done: self._ended(hub_id, user, done))
        return await asyncio.shield(download)

    def stop(self) -> None:
        for download in self._downloads.values():
            download.cancel()

    async def close(self) -> None:
        """After `stop`: returns when no process is left."""
        await asyncio.gather(*self._downloads.values(), return_exceptions=True)

    def _expect_room(self, user: int) -> None:
        own, most = self._users[user], self.limits.downloads_per_user
        if own >= most:
            raise Busy(f"you have {own} downloads from the hub, the limit of one user: wait for one", limit=most)
        if len(self._downloads) >= self.limits.downloads:
            limit = self.limits.downloads
            raise Busy(f"the daemon has {limit} downloads from the hub, its limit: try again", limit=limit)

    def _ended(self, hub_id: str, user: int, download: asyncio.Task[str]) -> None:
        del self._downloads[hub_id]
        self._users[user] -= 1
        if not download.cancelled():
            download.exception()  # the caller may have been cancelled: marks the error as seen

    async def _fetch(self, hub_id: str) -> str:
        log.info("hub_download id=%s", hub_id)
        environ = os.environ | {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        command = python_module("djinnd.server.checkpoints.hub_download", hub_id, str(os.getpid()))
        process = await asyncio.create_subprocess_exec(*command, stdin=DEVNULL, stdout=PIPE, env=environ)
        try:
            async with asyncio.timeout(self.limits.hub_download):
                told, _ = await process.communicate()
        except TimeoutError as error:
            raise ModelNotFound(
                f"{hub_id} was not downloaded within {self.limits.hub_download:g} s (limits.hub_download): "
                "finished files are kept, try again",
                limit=self.limits.hub_download,
            ) from error
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        kind, _, text = told.decode(errors="replace").partition(" ")
        if kind != "folder":
            raise ModelNotFound(text or f"{hub_id}: the download ended with status {process.returncode}")
        return text
