"""What sessions have in lower tiers: by which keys their pages are known, and what of these is there, and is worth its
way."""

from __future__ import annotations

from collections.abc import Iterable

from djinnd.core.session import Session
from djinnd.core.stops import LeftStage
from djinnd.kvcache.left_pages import Left, LeftPages
from djinnd.kvcache.paging import Found, Paging
from djinnd.kvcache.prefixes import Key
from djinnd.scheduler.costs import Costs
from djinnd.scheduler.stage_pages import full_tokens, keys_with, spared
from djinnd.scheduler.useful_kv import of_use_elsewhere, origin, possible_ends


class Elsewhere:
    """Of one model's sessions. Moves nothing."""

    def __init__(self, paging: Paging) -> None:
        self.kv = paging.kv
        self.paging = paging
        self.left = LeftPages()
        self.costs = Costs()

    # --- what they have left ----------------------------------------------------------------------------------------

    def remember(self, session: Session) -> None:
        """Of one that is about to give up the pages with its KV."""
        # The pages keep their keys, whatever becomes public meanwhile.
        self.left.remember(session.id, Left(self.keys(session), session.computed, session.wakes_at))

    def remember_staged(self, session: Session, staged: list[Key]) -> LeftStage:
        """Of one that is about to give up its pages with its stage, of which the last ones have these keys."""
        assert session.stage is not None
        keys = keys_with(session, staged, self.kv)
        self.left.remember(session.id, Left(keys, full_tokens(session, self.kv), session.wakes_at, len(staged)))
        return LeftStage(session.stage, session.computed, len(session.tokens))

    def lose_stage(self, session: Session) -> None:
        """It will not have it again: nobody else finds the pages with it, which can be spared."""
        session.left_stage = None
        left = self.left.get(session.id)
        if left is not None and left.staged:
            kept = len(left.keys) - left.staged
            self.paging.can_spare(left.keys[kept:])
            self.left.remember(session.id, left._replace(keys=left.keys[:kept], staged=0))

    def forget(self, session: Session) -> None:
        self.lose_stage(session)
        self.left.forget(session.id)

    def revise(self, session: Session, left: Left, first: int) -> None:
        """What it had left, without a stage, may be of use up to position `first`."""
        reach = min(left.tokens, first)
        self.left.remember(
            session.id, left._replace(keys=left.keys[: self.kv.pages_for(reach)], tokens=reach, staged=0)
        )

    def are_wanted_by(self, keys: Iterable[Key], at: float) -> bool:
        """Of each of these pages somebody who has left it is expected back by then."""
        return all(self.left.wanted_at(key) <= at for key in keys)

    # --- the keys of their pages ------------------------------------------------------------------------------------

    def keys(self, session: Session) -> list[Key]:
        """Of the pages with its KV, as far as it goes; of a session that has left, as far as it went then; of one that
        an earlier engine had, those that it has left."""
        if session.computed:
            return self.kv.keys_of(session.id, origin(session), session.names, session.computed)
        left = self.left.get(session.id)
        if left is None:
            names, begin = session.names, origin(session)
            if session.left_at:
                reach = min(session.left_at, len(names))
                left = Left(self.kv.keys_of(session.id, begin, names, reach), reach)
            elif self.paging.host is None:
                return []
            else:
                found = self.paging.find(session.id, begin, names, 0, len(names), possible_ends(session))
                left = Left(list(found.keys), found.tokens)
            self.left.remember(session.id, left)
        return left.keys

    def keys_not_held(self, session: Session) -> list[Key]:
        """Of the pages with its KV, those that it does not hold on the device: some of one that comes back when what
        the device still had of it has been spared, and the rest cannot be had yet."""
        held = self.kv.pages_held(session.id)
        if not held:
            return self.keys(session)
        left = self.left.get(session.id)
        return left.keys[held:] if left is not None else []

    # --- what is there ----------------------------------------------------------------------------------------------

    def holds_kv_only(self, session: Session) -> bool:
        """Of the pages that it has on the device: so that others may come behind them."""
        return session.stage is None and self.kv.pages_held(session.id) == self.kv.pages_for(session.computed)

    def has_some(self, session: Session) -> bool:
        """Its pages have left, and a lower tier has what would be brought back of them."""
        return self.left.get(session.id) is not None and self.found(session) is not None

    def found(self, session: Session) -> Found | None:
        """What lower tiers have of its KV, where that is worth its way."""
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
            of_use_elsewhere(session),
            possible_ends(session),
            left,
        )
        if found.tokens <= computed:
            return None
        must = computed < session.foreign_tokens
        beside = len(session.tokens) - found.tokens if session.request is not None else 0
        return found if must or self.costs.prefer_copy(found, computed, beside, self.kv.page_bytes) else None

    def _found_staged(self, session: Session, staged: LeftStage) -> Found | None:
        """All pages that it has left with its stage, where bringing them back is cheaper than to run again what that
        spares; so it has to be of those with its stage alone, as the others could come back without them."""
        left, start = self.left.get(session.id), session.computed // self.kv.page_size
        if left is None or session.computed > staged.computed or len(session.tokens) != staged.length:
            return None
        behind, size = len(left.keys) - left.staged, self.kv.page_size
        found = self.paging.find_staged(left.keys[start:], start * size, staged.length)
        inside = self.paging.find_staged(left.keys[behind:], behind * size, staged.length)
        if found is None or inside is None:
            return None
        for part, computed in ((found, session.computed), (inside, staged.computed)):
            as_it_seems = staged.length - spared(staged, computed)
            if not self.costs.prefer_copy(part, as_it_seems, 0, self.kv.page_bytes):
                return None
        return found

    def check_integrity(self) -> None:
        self.left.check_integrity()
