"""What each tenant may have: which rule of the configuration is a user's, and what is left of its tokens a second.

Of the other quotas the sessions are counted in sessions.py, and weight and pages are kept by engines, which are told
`Tenant.limits`. A rule that has changed holds for what begins after that. Times come from the caller.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from djinn_client.errors import QuotaExceeded
from djinn_client.host_memory import available
from djinn_client.principals import number_of
from djinn_client.scheduling import CLASSES, Class, QuotaUse, ResourceUse
from djinnd.config import Limits, Quota
from djinnd.messages import TenantLimits, TenantUse
from djinnd.server.bucket import Bucket
from djinnd.server.ledger import Ledger, Limit, Resource
from djinnd.server.rate import Rate
from djinnd.server.shared_objects import SHM

BURST = 10.0  # seconds of its rate that a tenant who used nothing may use at once
_WINDOW = 10.0  # seconds over which use is averaged
_LEAST_WINDOW_BYTES = 256 << 20
_WINDOW_SHARE = 128  # of the host memory that is available at the first question


class Rule(NamedTuple):
    """`name` is that in the configuration; "" where no rule matches, and there is no limit."""

    name: str
    quota: Quota


class Tenant:
    """A user, the rule that holds for it, its ledger, and the tokens that it uses. All of its sessions and connections
    share this. `limits` is called for the ones that hold now."""

    def __init__(self, user: int, rule: Rule, at: float, limits: Callable[[], Limits]) -> None:
        self.user = user
        self.tokens = 0  # computed for the tenant since the daemon began
        self.ledger = Ledger(self._limit_of)
        self._limits = limits
        self._use = Rate(_WINDOW, at)
        self._bucket: Bucket | None = None  # where the rule has tokens_per_s
        self.follow(rule, at)

    def follow(self, rule: Rule, at: float) -> None:
        """From now on."""
        self.rule = rule
        rate = rule.quota.tokens_per_s
        if rate is None:
            self._bucket = None
        elif self._bucket is None:
            self._bucket = Bucket(rate, rate * BURST, at)
        else:
            self._bucket.resize(rate, rate * BURST, at)

    @property
    def quota(self) -> Quota:
        return self.rule.quota

    @property
    def limits(self) -> TenantLimits:
        quota = self.quota
        return TenantLimits(self.user, quota.weight, quota.device_kv, quota.host_kv, quota.disk_kv)

    def most_sessions(self, most: int) -> int:
        """That the tenant may have, where nobody may have more than that."""
        return most if self.quota.sessions is None else min(self.quota.sessions, most)

    def expect_session(self, own: int, priority: Class) -> None:
        """There is room for one more of this class, where the tenant has `own`. Raises QuotaExceeded."""
        self.expect_class(priority)
        limit = self.quota.sessions
        if limit is not None and own >= limit:
            told = f"you have {own:,} sessions, and {self._key('sessions')} is {limit:,}: close some"
            raise QuotaExceeded(told, quota="sessions", rule=self.rule.name, limit=limit, used=own)

    def expect_class(self, priority: Class) -> None:
        """Raises QuotaExceeded."""
        highest = self.quota.highest_class
        if CLASSES.index(priority) < CLASSES.index(highest):
            may = " or ".join(CLASSES[CLASSES.index(highest) :])
            told = f"{self._key('highest_class')} is {highest}, and {priority} is above that: ask for {may}"
            raise QuotaExceeded(told, quota="highest_class", rule=self.rule.name, limit=highest, used=priority)

    def expect_tiers(self, host: int | None, disk: int | None) -> None:
        """Bytes that the tenant asks for, for pages of a model on the host and on disk. Raises QuotaExceeded where they
        are more than its pages may have there."""
        for name, asked in (("host_kv", host), ("disk_kv", disk)):
            limit = getattr(self.quota, name)
            if limit is not None and asked is not None and asked > limit:
                told = f"{asked:,} bytes of {name} are more than {self._key(name)}, which is {limit:,}: ask for less"
                raise QuotaExceeded(told, quota=name, rule=self.rule.name, limit=limit, used=0, needed=asked)

    def expect_tokens(self, at: float) -> None:
        """Raises QuotaExceeded where the tenant has used more than it may have."""
        rate = self.quota.tokens_per_s
        wait_s = 0.0 if self._bucket is None else self._bucket.wait_s(at)
        if rate is None or not wait_s:
            return
        retry_s = math.ceil(wait_s * 1e3) / 1e3
        raise QuotaExceeded(
            f"you have used {math.ceil(wait_s * rate):,} tokens too many: {self._key('tokens_per_s')} is {rate:,.10g}, "
            f"and {rate * BURST:,.10g} at once: try again in {retry_s:g} s",
            quota="tokens_per_s",
            rule=self.rule.name,
            limit=rate,
            used=round(self._use.per_second(at), 3),
            retry_s=retry_s,
        )

    def charge(self, tokens: int, at: float) -> None:
        """Tokens that were computed for the tenant: of a prompt, or of an output."""
        self.tokens += tokens
        self._use.count(tokens, at)
        if self._bucket is not None:
            self._bucket.take(tokens, at)

    def use(
        self, sessions: int, most_sessions: int, held: TenantUse | None, others: Sequence[ResourceUse], at: float
    ) -> QuotaUse:
        """What the tenant has: so many sessions, of which nobody may have more than that, pages as the engine says
        (None: it has said nothing), and other resources, beside those of its ledger."""
        quota = self.quota
        return QuotaUse(
            user=self.user,
            rule=self.rule.name,
            weight=quota.weight,
            highest_class=quota.highest_class,
            sessions=sessions,
            sessions_limit=self.most_sessions(most_sessions),
            device_kv=held.device_kv if held else 0,
            device_kv_limit=quota.device_kv,
            host_kv=held.host_kv if held else 0,
            host_kv_limit=quota.host_kv,
            disk_kv=held.disk_kv if held else 0,
            disk_kv_limit=quota.disk_kv,
            tokens_per_s=self._use.per_second(at),
            tokens_per_s_limit=quota.tokens_per_s,
            resources=[*self.ledger.uses(), *others],
        )

    def _limit_of(self, resource: Resource) -> Limit:
        most = getattr(self.quota, resource.name)
        if most is not None:
            return Limit(self._key(resource.name), self.rule.name, most)
        name = f"{resource.name}_per_user"
        most = getattr(self._limits(), name)
        return Limit(f"limits.{name}", "", _AUTO[resource.name]() if most is None else most)

    def _key(self, quota: str) -> str:
        return f"quotas.{self.rule.name}.{quota}"


@cache
def _window_bytes() -> int:
    """That a user's clients may keep, where the configuration leaves it to the daemon."""
    return max(_LEAST_WINDOW_BYTES, (available() or 0) // _WINDOW_SHARE)


@cache
def _arena_bytes() -> int:
    """Of shared memory that a user's models may take, likewise: half of all."""
    room = os.statvfs(SHM)
    return room.f_blocks * room.f_frsize // 2


_AUTO = {"window_bytes": _window_bytes, "arena_bytes": _arena_bytes}


class Quotas:
    """The rules, and every tenant that was seen. `limits` may be replaced."""

    def __init__(
        self, rules: Mapping[str, Quota], groups_of: Callable[[int], Collection[int]], limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self._rules = rules
        self._groups_of = groups_of
        self._tenants: dict[int, Tenant] = {}

    def __iter__(self) -> Iterator[Tenant]:
        return iter(list(self._tenants.values()))

    def tenant(self, user: int, at: float) -> Tenant:
        """Always the same one, so that what was used does not go with a session."""
        tenant = self._tenants.get(user)
        if tenant is None:
            tenant = self._tenants[user] = Tenant(user, self._rule_of(user), at, lambda: self.limits)
        return tenant

    def reload(self, rules: Mapping[str, Quota], at: float) -> None:
        """These rules hold from now on, and the groups that users are in now."""
        self._rules = rules
        for tenant in self:
            tenant.follow(self._rule_of(tenant.user), at)

    def _rule_of(self, user: int) -> Rule:
        """The first that matches."""
        groups: Collection[int] | None = None  # asked for when a rule wants them: who has them may be far away
        for name, quota in self._rules.items():
            if user in map(_principal, quota.users) or not (quota.users or quota.groups):
                return Rule(name, quota)
            if quota.groups:
                groups = self._groups_of(user) if groups is None else groups
                if not set(quota.groups).isdisjoint(groups):
                    return Rule(name, quota)
        return Rule("", Quota())


def _principal(user: int | str) -> int:
    """Of an entry in a rule's `users`."""
    return user if isinstance(user, int) else number_of(user)
