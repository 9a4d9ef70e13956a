"""The quotas of tenants: the rule of the configuration for each user, and the rate of its tokens.

sessions.py counts sessions. Engines enforce weight and pages; they receive `Tenant.limits`. A changed rule applies to
requests that begin after the change. Callers give the times, in seconds.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from djinn_client.errors import QuotaExceeded
from djinn_client.protocol.fields.scheduling import CLASSES, Class, QuotaUse, ResourceUse
from djinn_client.transport.host_memory import available
from djinnd.config import Limits, Quota
from djinnd.config.principals import number_of
from djinnd.messages import TenantLimits, TenantUse
from djinnd.server.quotas.bucket import Bucket
from djinnd.server.quotas.ledger import Ledger, Limit, Resource
from djinnd.server.quotas.rate import Rate
from djinnd.server.system.shared_objects import SHM

BURST = 10.0  # seconds of its rate that an idle tenant may use at once
_WINDOW = 10.0  # seconds over which use is averaged
_LEAST_WINDOW_BYTES = 256 << 20
_WINDOW_SHARE = 128  # of the host memory that is available when it is first asked for


class Rule(NamedTuple):
    """The rule for a user. `name` is its name in the configuration; empty if no rule matches and there is no limit."""

    name: str
    quota: Quota


class Tenant:
    """A user with its rule, its ledger and its use of tokens. All of its sessions and connections share this object.
    `limits` returns the limits in force."""

    def __init__(self, user: int, rule: Rule, at: float, limits: Callable[[], Limits]) -> None:
        self.user = user
        self.tokens = 0  # computed for the tenant since the daemon started
        self.ledger = Ledger(self._limit_of)
        self._limits = limits
        self._use = Rate(_WINDOW, at)
        self._bucket: Bucket | None = None  # None if the rule has no tokens_per_s
        self.follow(rule, at)

    def follow(self, rule: Rule, at: float) -> None:
        """Applies a rule from now on."""
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
        """The most sessions that the tenant may have; `most` is the limit for all users."""
        return most if self.quota.sessions is None else min(self.quota.sessions, most)

    def expect_session(self, own: int, priority: Class) -> None:
        """Checks that the tenant, which has `own` sessions, may open one more of this class. Raises QuotaExceeded."""
        self.expect_class(priority)
        limit = self.quota.sessions
        if limit is not None and own >= limit:
            told = f"you have {own:,} sessions, and {self._key('sessions')} is {limit:,}: close some"
            raise QuotaExceeded(told, quota="sessions", rule=self.rule.name, limit=limit, used=own)

    def expect_class(self, priority: Class) -> None:
        """Checks that the tenant may use this class. Raises QuotaExceeded."""
        highest = self.quota.highest_class
        if CLASSES.index(priority) < CLASSES.index(highest):
            may = " or ".join(CLASSES[CLASSES.index(highest) :])
            told = f"{self._key('highest_class')} is {highest}, and {priority} is above that: ask for {may}"
            raise QuotaExceeded(told, quota="highest_class", rule=self.rule.name, limit=highest, used=priority)

    def expect_tiers(self, host: int | None, disk: int | None) -> None:
        """Checks the bytes that the tenant requests for pages of a model on the host and on disk. Raises QuotaExceeded
        if its quota is smaller."""
        for name, asked in (("host_kv", host), ("disk_kv", disk)):
            limit = getattr(self.quota, name)
            if limit is not None and asked is not None and asked > limit:
                told = f"{asked:,} bytes of {name} are more than {self._key(name)}, which is {limit:,}: ask for less"
                raise QuotaExceeded(told, quota=name, rule=self.rule.name, limit=limit, used=0, needed=asked)

    def expect_tokens(self, at: float) -> None:
        """Checks that the tenant has tokens left. Raises QuotaExceeded."""
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
        """Charges tokens that were computed for the tenant, of a prompt or of an output."""
        self.tokens += tokens
        self._use.count(tokens, at)
        if self._bucket is not None:
            self._bucket.take(tokens, at)

    def use(
        self, sessions: int, most_sessions: int, held: TenantUse | None, others: Sequence[ResourceUse], at: float
    ) -> QuotaUse:
        """The tenant's use of its quotas. `sessions`: its sessions, of `most_sessions` that any user may have. `held`:
        its pages as the engine has reported them, or None. `others`: resources that are not in its ledger."""
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
    """The most bytes of windows that a user's clients may keep, if the configuration does not say: a share of host
    memory."""
    return max(_LEAST_WINDOW_BYTES, (available() or 0) // _WINDOW_SHARE)


@cache
def _arena_bytes() -> int:
    """The most shared memory that a user's models may take, if the configuration does not say: half of all."""
    room = os.statvfs(SHM)
    return room.f_blocks * room.f_frsize // 2


_AUTO = {"window_bytes": _window_bytes, "arena_bytes": _arena_bytes}


class QuotaTable:
    """The rules, and all tenants that have been seen. `limits` may be replaced."""

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
        """The tenant of a user: always the same object, so that its use outlives its sessions."""
        tenant = self._tenants.get(user)
        if tenant is None:
            tenant = self._tenants[user] = Tenant(user, self._rule_of(user), at, lambda: self.limits)
        return tenant

    def reload(self, rules: Mapping[str, Quota], at: float) -> None:
        """Applies new rules to all tenants, and looks up the users' groups again."""
        self._rules = rules
        for tenant in self:
            tenant.follow(self._rule_of(tenant.user), at)

    def _rule_of(self, user: int) -> Rule:
        """The first rule that matches the user."""
        groups: Collection[int] | None = None  # looked up only if a rule needs them: it may be slow
        for name, quota in self._rules.items():
            if user in map(_principal, quota.users) or not (quota.users or quota.groups):
                return Rule(name, quota)
            if quota.groups:
                groups = self._groups_of(user) if groups is None else groups
                if not set(quota.groups).isdisjoint(groups):
                    return Rule(name, quota)
        return Rule("", Quota())


def _principal(user: int | str) -> int:
    """The principal of an entry in a rule's `users`."""
    return user if isinstance(user, int) else number_of(user)
