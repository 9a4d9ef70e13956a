"""A user's ledger: how much of each resource of the daemon the user has, and the limits.

A resource is charged before the memory, the descriptor or the table entry is taken, and released when that is gone. The
limit of a resource is `quotas.RULE.NAME` of the rule that matches the user, or else `limits.NAME_per_user`.

Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from djinn_client.errors import QuotaExceeded
from djinn_client.protocol.fields.scheduling import ResourceUse


class Resource(NamedTuple):
    """A kind of resource. `what` names it in errors; `remedy` says how the user gets below the limit."""

    name: str
    what: str
    remedy: str


CONNECTION_BYTES = Resource("connection_bytes", "bytes in connections", "read the replies, or send less at once")
DESCRIPTORS = Resource("descriptors", "descriptors that are not closed yet", "hand over fewer at once")
REQUESTS = Resource("requests", "unfinished requests", "wait for one of them")
WINDOW_BYTES = Resource(
    "window_bytes", "bytes in windows that your clients keep", "drop activations, logits or KV that you were given"
)
JOURNAL_BYTES = Resource("journal_bytes", "bytes in the journal", "close sessions, or end edits")
MODEL_FILES = Resource("model_files", "open files of models", "unload some of your models")
MODELS = Resource("models", "loaded models", "unload one of your models")
ARENA_BYTES = Resource(
    "arena_bytes",
    "bytes of shared memory in your models",
    "unload one of your models, or load this one with less host_kv",
)
ADAPTER_BYTES = Resource("adapter_bytes", "bytes in loaded adapters", "close sessions that use others")
RESOURCES = (
    CONNECTION_BYTES,
    DESCRIPTORS,
    REQUESTS,
    WINDOW_BYTES,
    JOURNAL_BYTES,
    MODEL_FILES,
    MODELS,
    ARENA_BYTES,
    ADAPTER_BYTES,
)


class Limit(NamedTuple):
    """A limit in force. `key`: its place in the configuration. `rule`: the name of the quota; empty for one of
    `limits`."""

    key: str
    rule: str
    most: int


class Ledger:
    """Amounts of each resource that one user has. `limit_of` returns the limit in force, which a reload may change."""

    def __init__(self, limit_of: Callable[[Resource], Limit]) -> None:
        self._limit_of = limit_of
        self._used: Counter[str] = Counter()

    def used(self, resource: Resource) -> int:
        return self._used[resource.name]

    def limit(self, resource: Resource) -> int:
        return self._limit_of(resource).most

    def has_room(self, resource: Resource, amount: int = 1) -> bool:
        return self._used[resource.name] + amount <= self._limit_of(resource).most

    def charge(self, resource: Resource, amount: int = 1) -> None:
        """Charges the resource. Raises QuotaExceeded; then nothing is charged."""
        self.expect_room(resource, amount)
        self._used[resource.name] += amount

    def expect_room(self, resource: Resource, amount: int = 1) -> None:
        """Raises QuotaExceeded if this amount more would exceed the user's limit."""
        used, limit = self._used[resource.name], self._limit_of(resource)
        if used + amount <= limit.most:
            return
        raise QuotaExceeded(
            f"you have {used:,} {resource.what}, this takes {amount:,} more, and {limit.key} is {limit.most:,}: "
            f"{resource.remedy}",
            quota=resource.name,
            rule=limit.rule,
            limit=limit.most,
            used=used,
        )

    def add(self, resource: Resource, amount: int) -> bool:
        """Charges a resource that is already taken, beyond the limit if need be. Returns True if it is within the
        limit."""
        self._used[resource.name] += amount
        return self._used[resource.name] <= self._limit_of(resource).most

    def release(self, resource: Resource, amount: int = 1) -> None:
        used = self._used[resource.name] - amount
        assert used >= 0, f"{-used:,} {resource.what} more were released than charged"
        self._used[resource.name] = used

    def uses(self) -> list[ResourceUse]:
        return [ResourceUse(each.name, self.used(each), self._limit_of(each).most) for each in RESOURCES]
