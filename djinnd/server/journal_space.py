"""A disk that is nearly full: the users who have most of the journal are refused first, and everybody else goes on.

Half of the last `limits.journal_reserve` bytes of the disk is shared equally by all users who have something in the
journal. The other half is for the copies that the journal makes until its log is short again.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from djinn_client.errors import QuotaExceeded
from djinnd.server.ledger import JOURNAL_BYTES
from djinnd.server.quotas import Tenant

COPIES = 4  # of a change, at most, until the log is copied: in the log as a change and folded, and both in the file


def expect_space(tenant: Tenant, nbytes: int, tenants: Iterable[Tenant], reserve: int, free: int) -> None:
    """For so many bytes more of the tenant's. `free`: see JournalFile.free_bytes. Raises QuotaExceeded."""
    needed = COPIES * nbytes
    if free - needed >= reserve:
        return
    used = tenant.ledger.used(JOURNAL_BYTES)
    users = sum(each is tenant or each.ledger.used(JOURNAL_BYTES) > 0 for each in tenants)
    share = reserve // 2 // max(users, 1)
    if used + nbytes <= share and needed <= free // 2:
        return
    raise QuotaExceeded(
        f"the journal's disk has room for {free:,} bytes, and writing this takes up to {needed:,}: that leaves less "
        f"than limits.journal_reserve ({reserve:,}), of which your share is {share:,}, and you have {used:,} bytes in "
        "the journal: close sessions or end edits, or have room made on that disk",
        quota="journal_reserve",
        limit=share,
        used=used,
        free=free,
    )
