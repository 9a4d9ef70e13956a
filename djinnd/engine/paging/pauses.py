"""Pauses that clients ask for. Each gets one reply, when the session's pages have reached the tier.

ask ─► no more rows ─► the tier is set up ─► on the host, sealed ─┬─────────────────────────────► Paused
                                                                  └─► to disk: written out, too ► Paused
Failed: no such tier · closed or resumed meanwhile · the disk is full. The session is then as it was before.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from djinn_client.errors import DjinnError, OutOfMemory, QuotaExceeded, Retry, SessionNotFound
from djinn_client.protocol import Tier
from djinnd import messages
from djinnd.core.session import Session
from djinnd.engine.io.channel import ServerChannel
from djinnd.engine.run.model_runner import ModelRunner
from djinnd.kvcache.moves import Transfer
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.prefixes import Key
from djinnd.kvcache.tier import Tier as Cache
from djinnd.scheduler.scheduler import Scheduler

NO_PAGES = "no pages on"  # prefix of a model's note that gives the reason why it lacks a tier


@dataclass(slots=True)
class _Pause:
    """A pause without a reply yet."""

    asked: messages.Pause
    session: Session
    was_paused: bool
    began: float
    is_leaving: bool = False  # the tier is set up and the session has begun to leave the device
    leaving: Transfer | None = None  # to the host; None: no copy is needed
    writing: Transfer | None = None  # to disk; None: not begun


@dataclass(eq=False)
class Pauses:
    """Owns the pauses that have no reply yet. Used by the engine's thread."""

    _scheduler: Scheduler
    _runners: Mapping[str, ModelRunner]  # by model, a live view
    _channel: ServerChannel
    _unanswered: list[_Pause] = field(init=False, default_factory=list)

    def ask(self, message: messages.Pause) -> None:
        """Raises SessionNotFound, or OutOfMemory if the model has no such tier."""
        session = self._scheduler.session(message.session)
        pause = _Pause(message, session, session.paused, time.monotonic())
        if self._scheduler.queues[session.model].residency.paging.is_coming:
            self._scheduler.pause(session.id)
        else:
            self._leave(pause)
        self._unanswered.append(pause)

    def _expect_tier(self, model: str, tier: Tier) -> None:
        """Raises OutOfMemory if the model has no such tier."""
        paging, notes = self._scheduler.queues[model].residency.paging, self._runners[model].weights.notes
        if paging.host is None or (tier == "disk" and paging.disk is None):
            why = next((note for note in notes if note.startswith(NO_PAGES)), "it is configured with none")
            raise OutOfMemory(f"{model} has no pages on the {tier} tier to pause a session to: {why}", tier=tier)

    def turn(self) -> None:
        """Called in each turn of the engine's loop, after the transfers' turn. Sends the replies that are due."""
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
        """→ the reply, or None if the pages are still moving. Raises the error that ends the pause."""
        session, asked = pause.session, pause.asked
        if self._scheduler.session(session.id) is not session:
            raise SessionNotFound(f"session {session.id} was closed", session=session.id)
        if not session.paused:
            raise Retry(f"session {session.id} was resumed before it had paused")
        residency = self._scheduler.queues[session.model].residency
        if not pause.is_leaving:
            if residency.paging.is_coming:
                return None
            self._leave(pause)
        if pause.leaving is not None and not pause.leaving.is_over:
            return None
        keys = residency.lower_tiers.keys(session)
        if residency.paging.are_on_their_way(keys):  # other sessions with the same prefix may wait for the same pages
            return None
        if asked.tier == "disk" and not self._is_on_disk(pause, residency.paging, keys):
            return None
        host, disk = residency.paging.count(keys)
        pages = disk if asked.tier == "disk" else host
        return messages.Paused(asked.request, pages, pages * residency.kv.page_bytes, time.monotonic() - pause.began)

    def _leave(self, pause: _Pause) -> None:
        """Starts to move the session's pages. Raises OutOfMemory if the model has no such tier."""
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
        """Writes out the pages that the disk lacks, and then drops them from the host. → True when that is done.

        If the disk does not take all pages, they stay on the host: raises OutOfMemory, or QuotaExceeded if the tenant's
        quota is the reason.
        """
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
    """Raises QuotaExceeded if the tenant may not have that many more pages on disk."""
    assert disk is not None
    limit, used = disk.tenancy.limit_of(tenant), disk.tenancy.used_by(tenant)
    if limit is not None and used + pages * disk.page_bytes > limit:
        raise QuotaExceeded(
            f"{pages:,} pages of the session, {pages * disk.page_bytes:,} bytes, exceed the quota disk_kv "
            f"({used:,} of {limit:,} bytes are in use): pause it to the host, or ask for a larger quota",
            quota="disk_kv",
            limit=limit,
            used=used,
        )
