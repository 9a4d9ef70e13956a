"""How many bytes of pages each tenant may hold on the device, of all models together.

At its quota, a tenant's sessions give way to each other: on the same model those that come after the one that needs
pages; on others the idle, and those whose clients read too slowly. Where that is not enough because sessions run on
several models, those of one of them lead, and the others' give way to them, too: of the model where the tenant's
foremost session runs, by class and then by age; and what becomes free is that model's until it has what it wanted. So
two that wait for each other's pages do not wait for ever, and do not take them from each other in turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from djinnd.core.request import Request
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.residence import Residence
from djinnd.scheduler.why import QUOTA

Claim = tuple[int, int]  # the less, the earlier: rank of a class, and a request's number


class Holder(Protocol):
    """One model's sessions."""

    kv: KvManager

    @property
    def pages_move(self) -> bool:
        """Some page is on its way, or will be."""

    def claim(self, tenant: int) -> Claim | None:
        """Of the tenant's foremost session that waits for a row. None: none does."""

    def leaves(self, tenant: int) -> bool:
        """Pages of the tenant are on their way out."""

    def retire(self, tenant: int, nbytes: int, *, active: bool) -> bool:
        """Has sessions of the tenant leave whose pages are so many bytes together, or all that can; those that do
        already count. `active`: also such as wait for a row. False: there is none."""


class _Lead(NamedTuple):
    """A session for which some of its tenant's on other models have left."""

    kv: KvManager
    claim: Claim  # its model's, then
    session: Session
    request: Request | None

    def lasts(self, holder: Holder, other: Claim | None) -> bool:
        """It still waits for them, and its model still comes before the one that has the `other` claim."""
        if other is not None and other < self.claim:  # ageing has put another first since
            return False
        session, request = self.session, self.session.request
        waits = request is not None and request is self.request and request.runnable and not session.paused
        return waits and session.passed_over == QUOTA and holder.claim(session.tenant) == self.claim


class DeviceQuotas:
    def __init__(self) -> None:
        self._limits: dict[int, int] = {}  # bytes, by tenant; who is not there has none
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
        """Pages of this model that the tenant may hold where it holds no others. None: any number."""
        limit = self._limits.get(tenant)
        return None if limit is None else limit // kv.page_bytes

    def held(self, tenant: int) -> int:
        """Bytes, of all models."""
        return sum([kv.pool.used_by(tenant) * kv.page_bytes for kv in self._holders])

    def has_room(self, tenant: int, kv: KvManager) -> bool:
        """For one page more of this model."""
        limit = self._limits.get(tenant)
        return limit is None or self.held(tenant) + kv.page_bytes <= limit

    def excess(self, session: Session, kv: KvManager, pages: int) -> int:
        """Of its tenant's pages that the session does not hold, how many, of the size of this model's, have to go
        before it holds `pages`. Where the limit has been lowered that is at most all of them: one session at a time
        goes on. Its own last page is one more while it is being copied, see `is_end_read`."""
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

    def make_way(self, session: Session, residence: Residence, candidates: Callable[[], Iterable[Session]]) -> bool:
        """Whether its tenant may hold the pages for all its tokens. Where those would be too many, others of its
        sessions leave: the first of `candidates`, or some of other models. False: not yet."""
        kv, tenant = residence.kv, session.tenant
        if not self.has_limit(tenant):
            return True
        pages = kv.pages_for(len(session.tokens))
        if pages > kv.pages_held(session.id) and self._another_leads(tenant, kv):
            return False
        while (excess := self.excess(session, kv, pages)) > 0:
            gave_way = residence.give_way(excess, tenant, candidates())
            gave_way = gave_way or self._retire_elsewhere(session, kv, excess * kv.page_bytes)
            if not gave_way or any(holder.leaves(tenant) for holder in self._holders.values()):
                return False
        return True

    def _another_leads(self, tenant: int, kv: KvManager) -> bool:
        """Another model, which waits for what becomes free."""
        lead = self._leads.get(tenant)
        if lead is None or lead.kv is kv:
            return False
        holder = self._holders.get(lead.kv)
        if holder is None or not lead.lasts(holder, self._holders[kv].claim(tenant)):
            del self._leads[tenant]
            return False
        return True

    def _retire_elsewhere(self, session: Session, kv: KvManager, nbytes: int) -> bool:
        """Has sessions of its tenant on other models leave, for the sake of this one. False: none can."""
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
        """Of any model."""
        return any(holder.pages_move for holder in self._holders.values())
