"""The step that follows a step which still runs: each of its rows brings the token that the running step samples.

The host launches it before it has read the running step's tokens, so that the device does not wait for the host between
two steps. The tokens stay on the device for it. A session that ends with its next token, by a stop token or because it
is cancelled, has a row in it in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from djinnd.core.batch import Row
from djinnd.core.request import RequestState
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.turns.device_quotas import DeviceQuotas


def following_rows(
    rows: Sequence[Row], kv: KvManager, quotas: DeviceQuotas, limit_of: Callable[[int], int]
) -> list[Row] | None:
    """The rows of the step after one with `rows`, which has been launched and not completed. Sessions that reach their
    last token in the running step have none. `limit_of`: the length in tokens that a tenant's session can reach.

    Reserves the pages that the rows need. None, and nothing has changed: a session needs more than its next token and a
    free page, or no row is left.
    """
    found, growing = [], []
    for index, row in enumerate(rows):
        session, request = row.session, row.request
        if not (_decodes(row) and session.request is request and request.state is RequestState.RUNNING):
            return None
        length = row.end + 1  # of the session, with the token that the running step samples
        if length - request.prompt_end >= request.max_tokens or length >= limit_of(session.tenant):
            continue
        if not kv.fits(session.id, length):
            if quotas.has_limit(session.tenant):
                return None
            growing.append(session)
        found.append(Row(session, request, row.end, 1, row.first_block, row.last_block, True, fed=index))
    if len(growing) > kv.pool.free:
        return None
    for session in growing:
        kv.reserve(session.id, session.tenant, len(session.tokens) + 1)
    return found or None


def _decodes(row: Row) -> bool:
    """True if the row brings one token and samples the next one."""
    return row.count == 1 and row.samples and row.stage is None and not row.request.stops
