"""Pauses that clients have asked for: each has one answer, given when the session's pages are where it said.

ask ─► no more rows ─► the tier is there ─► on the host, sealed ─┬─────────────────────────────► Paused
                                                                 └─► to disk: written out, too ► Paused
Failed: no such tier · closed or resumed meanwhile · the disk is full. The session is then as it was before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

from djinn_client.errors import DjinnError, OutOfMemory, QuotaExceeded, Retry, SessionNotFound
from djinn_client.protocol import Tier
from djinnd import messages
from djinnd.core.session import Session
from djinnd.engine.channel import Channel
from djinnd.engine.model_runner import ModelRunner
from djinnd.kvcache.moves import Transfer
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.prefixes import Key
from djinnd.kvcache.tier import Tier as Cache
from djinnd.scheduler.scheduler import Scheduler

NO_PAGES = "no pages on"  # so begins a model's note that says why it lacks a tier


@dataclass(slots=True)
class _Pause:
    """That has not been answered."""

    asked: messages.Pause
    session: Session
    was_paused: bool
    began: float
    is_leaving: bool = False  # from when on the tier is known to be there
    leaving: Transfer | None = None  # to the host; None: nothing is to be waited for
    writing: Transfer | None = None  # to disk, once it has begun


class Pauses:
    """Belongs to the engine's thread."""

    def __init__(self, scheduler: Scheduler, runners: Mapping[str, ModelRunner], channel: Channel) -> None:
        """`runners`: by model, as they are at any time."""
        self._scheduler = scheduler
        self._runners = runners
        self._channel = channel
        self._unanswered: list[_Pause] = []

    def ask(self, message: messages.Pause) -> None:
        try:
            session = self._scheduler.session(message.session)
            pause = _Pause(message, session, session.paused, time.monotonic())
            if self._scheduler.residence(session.model).paging.is_coming:
                self._scheduler.pause(session.id)
            else:
                self._leave(pause)
        except DjinnError as error:
            self._channel.refuse(message.request, error)
        else:
            self._unanswered.append(pause)

    def _expect_tier(self, model: str, tier: Tier) -> None:
        """Raises OutOfMemory."""
        paging, notes = self._scheduler.residence(model).paging, self._runners[model].weights.notes
        if paging.host is None or (tier == "disk" and paging.disk is None):
            why = next((note for note in notes if note.startswith(NO_PAGES)), "it is configured with none")
            raise OutOfMemory(f"{model} has no pages on the {tier} tier to pause a session to: {why}", tier=tier)

    def turn(self) -> None:
        """In each turn of the engine's loop, when transfers have had theirs."""
        unanswered = []
        for pause in self._unanswered:
            try:
                reply = self._reply(pause)
            except DjinnError as error:
                self._channel.refuse(pause.asked.request, error)
                continue
            if reply is None:
                unanswered.append(pause)
            else:
                self._channel.send(reply)
        self._unanswered = unanswered

    def _reply(self, pause: _Pause) -> messages.Paused | None:
        """None: not yet. Raises why it never will be."""
        session, asked = pause.session, pause.asked
        if self._scheduler.session(session.id) is not session:
            raise SessionNotFound(f"session {session.id} was closed", session=session.id)
        if not session.paused:
            raise Retry(f"session {session.id} was resumed before it had paused")
        residence = self._scheduler.residence(session.model)
        if not pause.is_leaving:
            if residence.paging.is_coming:
                return None
            self._leave(pause)
        if pause.leaving is not None and not pause.leaving.is_over:
            return None
        keys = residence.elsewhere.keys(session)
        if residence.paging.are_on_their_way(keys):  # for others with the same prefix, too
            return None
        if asked.tier == "disk" and not self._is_on_disk(pause, residence.paging, keys):
            return None
        host, disk = residence.paging.count(keys)
        pages = disk if asked.tier == "disk" else host
        return messages.Paused(asked.request, pages, pages * residence.kv.page_bytes, time.monotonic() - pause.began)

    def _leave(self, pause: _Pause) -> None:
        """Raises OutOfMemory where there is no such tier."""
        session = pause.session
        try:
            self._expect_tier(session.model, pause.asked.tier)
        except OutOfMemory:
            self._undo(pause)
            raise
        pause.is_leaving = True
        pause.leaving = self._scheduler.pause(session.id)

    def _undo(self, pause: _Pause) -> None:
        if not pause.was_paused:
            self._scheduler.resume(pause.session.id)

    def _is_on_disk(self, pause: _Pause, paging: Paging, keys: list[Key]) -> bool:
        """What the disk lacks is written out, and the host then forgets it. Raises OutOfMemory where the disk does not
        take all pages, QuotaExceeded where it may not: they stay on the host."""
        session = pause.session
        if pause.writing is None:
            pause.writing = paging.write_out(session.id, keys)
        if not pause.writing.is_over:
            return False
        paging.forget_on_host(keys)
        lacking = paging.lacking_on_disk(keys)
        if not (lacking and pause.writing.failed):
            return True
        self._undo(pause)
        _expect_quota(session.tenant, lacking, paging.disk)
        folder = self._runners[session.model].load.disk_folder
        raise OutOfMemory(
            f"{lacking:,} pages of the session found no room on disk, {folder}: make some, or pause it to the host",
            tier="disk",
            pages=lacking,
        )


def _expect_quota(tenant: int, pages: int, disk: Cache | None) -> None:
    """Raises QuotaExceeded where the tenant may not have so many pages more on disk."""
    assert disk is not None
    limit, used = disk.tenancy.limit_of(tenant), disk.tenancy.used_by(tenant)
    if limit is not None and used + pages * disk.page_bytes > limit:
        raise QuotaExceeded(
            f"{pages:,} pages of the session, {pages * disk.page_bytes:,} bytes, exceed the quota disk_kv "
            f"({used:,} of {limit:,} bytes are in use): pause it to the host, or have the quota raised",
            quota="disk_kv",
            limit=limit,
            used=used,
        )
