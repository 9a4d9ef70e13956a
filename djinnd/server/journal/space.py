"""A nearly full disk: the users with the most data in the journal are refused first, and all others go on.

Half of the last `limits.journal_reserve` bytes of the disk is shared equally by all users that have data in the
journal. The other half is for the copies that the journal makes until its log is short again.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Iterable

from djinn_client.errors import QuotaExceeded
from djinnd.server.quotas.ledger import JOURNAL_BYTES
from djinnd.server.quotas.quotas import Tenant

COPIES = 4  # of a change until the log is checkpointed: as a change and folded, both in the log and in the file


def expect_space(tenant: Tenant, nbytes: int, tenants: Iterable[Tenant], reserve: int, free: int) -> None:
    """Checks that the tenant may write `nbytes` more. `free`: see JournalFile.free_bytes. Raises QuotaExceeded."""
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
        "the journal: close sessions or end edits, or free space on that disk",
        quota="journal_reserve",
        limit=share,
        used=used,
        free=free,
    )
