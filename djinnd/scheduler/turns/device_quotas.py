"""Limits the bytes of pages that each tenant may hold on the device, over all models.

At its quota, a tenant's sessions evict each other. On the same model, a session evicts sessions behind it in the
queue. On other models, it evicts idle sessions and those with a slow client.

That may not be enough if the tenant's sessions run on several models. Then one model leads: the model of the tenant's
foremost session, by class and then by age. The tenant's sessions on other models are evicted for it, and the bytes that
become free are kept for it until it has what it needs. So two sessions that wait for each other's pages neither wait
without end nor take them from each other in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.residency.kv_residency import KvResidency
from djinnd.scheduler.why import QUOTA

Claim = tuple[int, int]  # rank of a class, and a request's number; the lower claim comes first


class Holder(Protocol):
    """The sessions of one model."""

    kv: KvManager
    residency: KvResidency

    def claim(self, tenant: int) -> Claim | None:
        """The rank of the tenant's foremost session that waits for a row; None if there is none."""

    def retire(self, tenant: int, nbytes: int, *, active: bool) -> bool:
        """Evicts sessions of the tenant until they free `nbytes`, or all that can be evicted. Sessions that are leaving
        already count. `active`: sessions that wait for a row may be evicted too. Returns False if there was none to
        evict."""


class _Lead(NamedTuple):
    """A session for which other sessions of its tenant, on other models, have been evicted."""

    kv: KvManager
    claim: Claim  # its model's claim at that time
    session: Session
    request: Request | None

    def lasts(self, holder: Holder, other: Claim | None) -> bool:
        """True if the session still waits for the pages, and its model still comes before the model with the `other`
        claim."""
        if other is not None and other < self.claim:  # ageing has put another session first since
            return False
        session, request = self.session, self.session.request
        waits = request is not None and request is self.request and request.runnable and not session.paused
        return waits and session.passed_over == QUOTA and holder.claim(session.tenant) == self.claim


class DeviceQuotas:
    """The limits of all tenants, and which model leads for each."""

    def __init__(self) -> None:
        self._limits: dict[int, int] = {}  # bytes, by tenant; a tenant without an entry has no limit
        self._holders: dict[KvManager, Holder] = {}
        self._leads: dict[int, _Lead] = {}  # by tenant

    def add(self, holder: Holder) -> None:
        self._holders[holder.kv] = holder

    def remove(self, kv: KvManager) -> None:
        del self._holders[kv]

    def set(self, tenant: int, limit: int | None) -> None:
        if limit is None:
            self._limits.pop(tenant, None)
        else:
            self._limits[tenant] = limit

    def has_limit(self, tenant: int) -> bool:
        return tenant in self._limits

    def most(self, tenant: int, kv: KvManager) -> int | None:
        """How many pages of this model the tenant may hold if it holds no others. None: no limit."""
        limit = self._limits.get(tenant)
        return None if limit is None else limit // kv.page_bytes

    def held(self, tenant: int) -> int:
        """Bytes that the tenant holds, over all models."""
        return sum([kv.pool.used_by(tenant) * kv.page_bytes for kv in self._holders])

    def has_room(self, tenant: int, kv: KvManager) -> bool:
        """True if the tenant may hold one more page of this model."""
        limit = self._limits.get(tenant)
        return limit is None or self.held(tenant) + kv.page_bytes <= limit

    def excess(self, session: Session, kv: KvManager, pages: int) -> int:
        """How many of its tenant's other pages have to leave before the session may hold `pages`, in pages of this
        model.

        If the limit has been lowered, the answer is at most all of them, so that one session at a time can run. While
        the session's own last page is being copied, it counts once more (see `KvManager.is_end_read`).
        """
        limit = self._limits.get(session.tenant)
        if limit is None:
            return 0
        read = kv.is_end_read(session.id, session.computed)
        missing = pages - kv.pages_held(session.id) + read
        if missing <= 0:
            return 0
        held = self.held(session.tenant)
        over = held + missing * kv.page_bytes - limit
        if over <= 0:
            return 0
        others = held - kv.own_pages(session.id, session.tenant) * kv.page_bytes
        return max(-(-min(over, others) // kv.page_bytes), int(read))

    def make_way(self, session: Session, residency: KvResidency, candidates: Callable[[], Iterable[Session]]) -> bool:
        """Returns True if the session's tenant may hold pages for all of its tokens. Otherwise evicts other sessions of
        the tenant: the first of `candidates`, or sessions on other models. Returns False if their pages are not free
        yet."""
        kv, tenant = residency.kv, session.tenant
        if not self.has_limit(tenant):
            return True
        pages = kv.pages_for(len(session.tokens))
        if pages > kv.pages_held(session.id) and self._another_leads(tenant, kv):
            return False
        while (excess := self.excess(session, kv, pages)) > 0:
            gave_way = residency.give_way(excess, tenant, candidates())
            gave_way = gave_way or self._retire_elsewhere(session, kv, excess * kv.page_bytes)
            if not gave_way or any(holder.residency.leaves(tenant) for holder in self._holders.values()):
                return False
        return True

    def _another_leads(self, tenant: int, kv: KvManager) -> bool:
        """True if another model leads for the tenant and waits for the bytes that become free."""
        lead = self._leads.get(tenant)
        if lead is None or lead.kv is kv:
            return False
        holder = self._holders.get(lead.kv)
        if holder is None or not lead.lasts(holder, self._holders[kv].claim(tenant)):
            del self._leads[tenant]
            return False
        return True

    def _retire_elsewhere(self, session: Session, kv: KvManager, nbytes: int) -> bool:
        """Evicts sessions of the tenant on other models for this session. Returns False if there was none to evict."""
        tenant = session.tenant
        others = [holder for holder in self._holders.values() if holder.kv is not kv]
        if any(holder.retire(tenant, nbytes, active=False) for holder in others):
            return True
        mine = self._holders[kv].claim(tenant)
        if mine is None:
            return False
        claims = [(holder.claim(tenant), holder) for holder in others]
        gave_way = any(
            holder.retire(tenant, nbytes, active=True) for claim, holder in claims if claim is not None and mine < claim
        )
        if gave_way:
            self._leads[tenant] = _Lead(kv, mine, session, session.request)
        return gave_way

    @property
    def pages_move(self) -> bool:
        """True if a page of any model is being copied or is about to be."""
        return any(holder.residency.anything_moves for holder in self._holders.values())
