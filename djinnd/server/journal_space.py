"""A disk that is nearly full: the users who have most of the journal are refused first, and everybody else goes on.

The last `limits.journal_reserve` bytes of the disk are shared equally by all users who have something in the journal.
Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from djinn_client.errors import QuotaExceeded
from djinnd.server.ledger import JOURNAL_BYTES
from djinnd.server.quotas import Tenant


def expect_space(tenant: Tenant, nbytes: int, tenants: Iterable[Tenant], reserve: int, free: int) -> None:
    """For so many bytes more of the tenant's, where less than the reserve is free. Raises QuotaExceeded."""
    used = tenant.ledger.used(JOURNAL_BYTES)
    users = sum(each is tenant or each.ledger.used(JOURNAL_BYTES) > 0 for each in tenants)
    share = reserve // max(users, 1)
    if used + nbytes <= share:
        return
    raise QuotaExceeded(
        f"the journal's disk has {free:,} bytes left, less than limits.journal_reserve ({reserve:,}), and you have "
        f"{used:,} bytes in the journal, more than an equal share of that ({share:,}): close sessions or end edits, or "
        "have room made on that disk",
        quota="journal_reserve",
        limit=share,
        used=used,
        free=free,
    )
