"""Explains in a sentence with figures why a session runs or what it waits for."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice, takewhile

from djinnd.core.request import RequestState
from djinnd.core.session import Session
from djinnd.kvcache.manager import KvManager
from djinnd.scheduler.residency.kv_residency import KvResidency

MOST_AHEAD = 1000  # sessions listed

ROOM, PAGES, QUOTA = "room", "pages", "quota"  # values of Session.passed_over


@dataclass(frozen=True, slots=True)
class Explanation:
    """`figures`: the figures of the sentence. `ahead`: ids of the model's active sessions that are served before this
    one."""

    state: str
    reason: str
    figures: dict[str, int | float | str] = field(default_factory=dict)
    ahead: list[str] = field(default_factory=list)


def explain(
    session: Session, residency: KvResidency, order: Iterable[Session], last_step: int, now: float, limit: int
) -> Explanation:
    """`order`: the model's active sessions in serving order. `last_step`: number of the model's last step. `limit`:
    tokens that the session can reach."""
    request = session.request
    if session.paused:
        return Explanation("paused", "resume it, and its call goes on: it gets no step until then")
    if residency.is_arriving(session):
        return _arriving(session, residency.kv)
    if request is None:
        return _idle(session, residency.kv, now)
    if request.state is RequestState.HELD:
        if "client" in request.holders:
            return Explanation("held", "its client has not read what it was sent: it goes on when that has been read")
        return Explanation("held", "the next tokens that its format allows are being computed: it goes on with them")
    if session.touched == last_step and last_step and not residency.is_leaving(session):
        length = len(session.tokens)
        left = max(0, min(request.max_tokens - max(length - request.prompt_end, 0), limit - length))
        figures: dict[str, int | float | str] = {"step": last_step, "tokens_left": left}
        if request.guessed:
            figures |= {"guessed_tokens": request.guessed, "kept_tokens": request.kept}
        return Explanation("running", "it had a row in the model's last step", figures)
    return _passed_over(session, residency, order, now)


def _arriving(session: Session, kv: KvManager) -> Explanation:
    pages = kv.pages_held(session.id)
    return Explanation(
        "arriving",
        f"its KV is on its way to the device, into {pages:,} pages of {kv.page_bytes:,} bytes",
        {"pages": pages, "page_bytes": kv.page_bytes},
    )


def _idle(session: Session, kv: KvManager, now: float) -> Explanation:
    pages = kv.pages_held(session.id)
    here = f"{pages:,} of its pages are on the device" if pages else "none of its pages are on the device"
    stage = session.stage if session.left_stage is None else session.left_stage.stage
    if stage is not None:
        block = stage.first
        reason = f"stopped at a breakpoint before block {block}: it goes on when its client resumes it; {here}"
        return Explanation("parked", reason, {"block": block, "pages": pages})
    if not session.waits:
        return Explanation("idle", f"no call runs on it; {here}", {"pages": pages})
    figures: dict[str, int | float | str] = {"pages": pages}
    if not session.wakes_at:
        return Explanation("waiting", f"its client said that it waits for something else; {here}", figures)
    figures["back_in_s"] = round(session.wakes_at - now, 3)
    back = f"its pages come back in {max(session.wakes_at - now, 0.0):.1f} s"
    return Explanation("waiting", f"its client said that it waits for something else: {back}; {here}", figures)


def _passed_over(session: Session, residency: KvResidency, order: Iterable[Session], now: float) -> Explanation:
    kv = residency.kv
    before = takewhile(lambda other: other is not session, order)
    ahead = [other.id for other in islice(before, MOST_AHEAD)]
    waited = now - session.row_at
    figures: dict[str, int | float | str] = {"waited_s": round(waited, 3), "ahead": len(ahead)}
    first = f"it has had no row for {waited:.1f} s: {len(ahead):,} sessions are served before it, and"
    request = session.request
    assert request is not None
    if request.deadline < math.inf:
        figures["deadline_in_s"] = round(request.deadline - now, 3)
    if session.passed_over == PAGES or residency.is_leaving(session):
        needed = kv.pages_for(len(session.tokens)) - kv.pages_held(session.id)
        free, capacity = kv.pool.free, kv.pool.capacity
        figures |= {"pages_needed": needed, "pages_free": free, "pages": capacity}
        reason = f"{first} it needs {needed:,} more pages, and {free:,} of {capacity:,} are free"
    elif session.passed_over == QUOTA:
        held = kv.pages_held(session.id)
        reason = f"{first} its user's sessions fill their quota device_kv of bytes on the device"
        figures |= {"pages_held": held}
    else:
        reason = f"{first} they leave no room in a step: their rows fill it, or one more would hold them up"
    return Explanation(request.state.value, reason, figures, ahead)
