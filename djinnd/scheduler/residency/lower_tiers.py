"""Looks up sessions' pages in lower tiers: their keys, which of them are there, and which are worth bringing back."""

from __future__ import annotations

from collections.abc import Iterable

from djinnd.core.session import Session
from djinnd.core.stops import LeftStage
from djinnd.kvcache.departed_pages import DepartedPages, Departure
from djinnd.kvcache.paging import Found, Paging
from djinnd.kvcache.prefixes import Key
from djinnd.scheduler.residency.copy_or_recompute import Costs
from djinnd.scheduler.residency.reusable_kv import (
    full_tokens,
    keys_with,
    origin,
    possible_ends,
    spared,
    usable_in_tiers,
)


class LowerTiers:
    """The pages off the device of one model's sessions. It looks them up and moves nothing."""

    def __init__(self, paging: Paging) -> None:
        self.kv = paging.kv
        self.paging = paging
        self.left = DepartedPages()
        self.costs = Costs()

    # --- departed pages ---------------------------------------------------------------------------------------------

    def remember(self, session: Session) -> None:
        """Notes the keys of a session's pages, before it gives them up."""
        # The pages keep these keys, even if a prefix of theirs becomes public later.
        self.left.remember(session.id, Departure(self.keys(session), session.computed, session.wakes_at))

    def remember_staged(self, session: Session, staged: list[Key]) -> LeftStage:
        """Notes the keys of a session's pages, before it gives them up with its stage. `staged` are the keys of the
        last ones."""
        assert session.stage is not None
        keys = keys_with(session, staged, self.kv)
        self.left.remember(session.id, Departure(keys, full_tokens(session, self.kv), session.wakes_at, len(staged)))
        return LeftStage(session.stage, session.computed, len(session.tokens))

    def lose_stage(self, session: Session) -> None:
        """Drops the stage with which the session has left the device. The host can spare the stage's pages, because no
        other session finds them."""
        session.left_stage = None
        left = self.left.get(session.id)
        if left is not None and left.staged:
            kept = len(left.keys) - left.staged
            self.paging.mark_unneeded(left.keys[kept:])
            self.left.remember(session.id, left._replace(keys=left.keys[:kept], staged=0))

    def forget(self, session: Session) -> None:
        self.lose_stage(session)
        self.left.forget(session.id)

    def revise(self, session: Session, left: Departure, first: int) -> None:
        """Notes that the session's departed pages, without its stage, are usable up to position `first` at most."""
        reach = min(left.tokens, first)
        if self.kv.keeps_states and reach < left.tokens:
            reach -= reach % self.kv.page_size  # the state at the end of a page
        self.left.remember(
            session.id, left._replace(keys=left.keys[: self.kv.pages_for(reach)], tokens=reach, staged=0)
        )

    def are_wanted_by(self, keys: Iterable[Key], at: float) -> bool:
        """True if each of these pages belongs to a session that is expected back by time `at`."""
        return all(self.left.wanted_at(key) <= at for key in keys)

    # --- the keys of their pages ------------------------------------------------------------------------------------

    def keys(self, session: Session) -> list[Key]:
        """The keys of the pages with the session's KV. For a session that has left, these are the keys at that time.
        For a session of an earlier engine process, they are the keys of the pages that lower tiers have."""
        if session.computed:
            return self.kv.keys_of(session.id, origin(session), session.names, session.computed)
        left = self.left.get(session.id)
        if left is None:
            names, begin = session.names, origin(session)
            if session.left_at:
                reach = min(session.left_at, len(names))
                left = Departure(self.kv.keys_of(session.id, begin, names, reach), reach)
            elif self.paging.host is None:
                return []
            else:
                found = self.paging.find(session.id, begin, names, 0, len(names), possible_ends(session))
                left = Departure(list(found.keys), found.tokens)
            self.left.remember(session.id, left)
        return left.keys

    def keys_not_held(self, session: Session) -> list[Key]:
        """The keys of the pages with the session's KV that it does not hold on the device.

        A session that is coming back may hold some already, which the device still had, while the rest cannot be
        brought yet.
        """
        held = self.kv.pages_held(session.id)
        if not held:
            return self.keys(session)
        left = self.left.get(session.id)
        return left.keys[held:] if left is not None else []

    # --- found pages ------------------------------------------------------------------------------------------------

    def holds_kv_only(self, session: Session) -> bool:
        """True if every page that it holds on the device has KV, so that pages brought back can follow them."""
        return session.stage is None and self.kv.pages_held(session.id) == self.kv.pages_for(session.computed)

    def has_some(self, session: Session) -> bool:
        """True if the session's pages have left and a lower tier has some that would be brought back."""
        return self.left.get(session.id) is not None and self.found(session) is not None

    def found(self, session: Session) -> Found | None:
        """The pages of the session that lower tiers have, if bringing them back is cheaper than recomputing them."""
        if (session.remaining <= 1 and session.request is not None) or not self.holds_kv_only(session):
            return None
        computed = session.computed
        if session.left_stage is not None and (staged := self._found_staged(session, session.left_stage)) is not None:
            return staged
        left = self.left.get(session.id)
        found = self.paging.find(
            session.id,
            origin(session),
            session.names,
            computed,
            usable_in_tiers(session),
            possible_ends(session),
            left,
        )
        if found.tokens <= computed:
            return None
        must = computed < session.foreign_tokens
        beside = len(session.tokens) - found.tokens if session.request is not None else 0
        return found if must or self.costs.prefer_copy(found, computed, beside, self.kv.page_bytes) else None

    def _found_staged(self, session: Session, staged: LeftStage) -> Found | None:
        """All pages that the session has left with its stage, if bringing them back is cheaper than recomputation. The
        pages with the stage alone must pass this test too, because the others could come back without them.
        """
        left, start = self.left.get(session.id), session.computed // self.kv.page_size
        if left is None or session.computed > staged.computed or len(session.tokens) != staged.length:
            return None
        behind, size = len(left.keys) - left.staged, self.kv.page_size
        found = self.paging.find_staged(left.keys[start:], start * size, staged.length)
        inside = self.paging.find_staged(left.keys[behind:], behind * size, staged.length)
        if found is None or inside is None:
            return None
        for part, computed in ((found, session.computed), (inside, staged.computed)):
            equivalent = staged.length - spared(staged, computed)
            if not self.costs.prefer_copy(part, equivalent, 0, self.kv.page_bytes):
                return None
        return found

    def check_integrity(self) -> None:
        self.left.check_integrity()
