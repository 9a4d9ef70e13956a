"""Pages between device, host and disk, beside simple memories in which every value says which tokens it is the KV of.

Moves begin, land, are sealed and fail in any order. Meanwhile sessions go on, are truncated, forked and closed. Tiers
are too small, processes die, and bytes decay unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from random import Random
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from djinnd.kvcache.manager import KvManager
from djinnd.kvcache.moves import Direction, Move, Transfer
from djinnd.kvcache.page_pool import OutOfPages
from djinnd.kvcache.paging import Found, Paging
from djinnd.kvcache.prefixes import Key, root
from djinnd.kvcache.tenancy import Tenancy
from djinnd.kvcache.tier import Tier, limit_tenant

MAX_CONTEXT = 24
PICKS = st.integers(0, 11)  # indices into any list of choices
OWNERS = [(0, b""), (1, b""), (0, b"salt")]  # tenant and salt


class Written(NamedTuple):
    """The KV of a token: it follows from all tokens before it."""

    origin: Key
    tokens: tuple[int, ...]


Page = list[Written | None]  # by offset; None: zeros, or unknown bytes


@dataclass(eq=False)
class Shadow:
    name: str
    tenant: int
    salt: bytes
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    ends: set[int] = field(default_factory=set)  # ends of its pages that were saved partly filled
    arrival: tuple[Transfer, tuple[Key, ...]] | None = None

    @property
    def origin(self) -> Key:
        return root(self.tenant, self.salt)

    def kv(self, position: int) -> Written:
        return Written(self.origin, tuple(self.tokens[: position + 1]))


def summed(page: Page) -> int:
    return int.from_bytes(blake2b(repr(page).encode(), digest_size=8).digest())


class PagingMachine(RuleBasedStateMachine):
    @initialize(
        pages=st.integers(4, 16),
        page_size=st.integers(1, 4),
        slots=st.tuples(st.integers(1, 10), st.integers(0, 10)),
        sessions=st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(3, 12)), min_size=3, max_size=5),
    )
    def begin(
        self,
        pages: int,
        page_size: int,
        slots: tuple[int, int],
        sessions: list[tuple[tuple[int, bytes], int]],
    ) -> None:
        self.size, self.pages = page_size, pages
        self.slots = dict(zip(("host", "disk"), slots, strict=True))
        self.tables = {name: bytearray(Tier.table_bytes(count)) for name, count in self.slots.items()}
        self.memory: dict[str, dict[int, Page]] = {"host": {}, "disk": {}}
        self.bad: dict[str, set[int]] = {"host": set(), "disk": set()}  # slots whose bytes have decayed
        self.shadows: dict[str, Shadow] = {}
        self.said: dict[Key, list[Written]] = {}  # the first values in a page with this key
        self.names = count(1)
        self.limits: dict[tuple[str, int], int] = {}  # slots, by tier and tenant
        self.most: dict[tuple[str, int], int] = {}  # the most that the tenant may hold from now on
        self.start()
        for owner, length in sessions:
            shadow = self.open_one(owner)
            self.go_on(shadow, [0] * length)

    def start(self) -> None:
        self.kv = KvManager(self.pages + 1, self.size, 1 << 20, MAX_CONTEXT)
        self.paging = Paging(self.kv)
        self.tenancies = {"host": Tenancy(), "disk": Tenancy()}
        for (name, tenant), slots in self.limits.items():
            limit_tenant(self.tenancies[name], tenant, slots)
        self.paging.use_host(Tier(self.tables["host"], self.slots["host"], self.tenancies["host"]))
        if self.slots["disk"]:
            self.paging.use_disk(Tier(self.tables["disk"], self.slots["disk"], self.tenancies["disk"]))
        self.device: dict[int, Page] = {}
        self.taken: list[Move] = []
        self.landed: list[Move] = []
        self.transfers: dict[Transfer, bool] = {}  # transfers that are not over; whether the session leaves with them

    def tier(self, name: str) -> Tier | None:
        return self.paging.host if name == "host" else self.paging.disk

    def draw(
        self, pick: int, suits: Callable[[Shadow], object] = lambda shadow: shadow.arrival is None
    ) -> Shadow | None:
        names = [name for name, shadow in self.shadows.items() if suits(shadow)]
        return self.shadows[names[pick % len(names)]] if names else None

    def page(self, page: int) -> Page:
        return self.device.setdefault(page, [None] * self.size)

    def keys(self, shadow: Shadow) -> list[Key]:
        """The keys of the pages with its KV."""
        keys = self.kv.keys_of(shadow.name, shadow.origin, shadow.tokens, shadow.computed)
        for index, key in enumerate(keys):
            start, end = index * self.size, min((index + 1) * self.size, shadow.computed)
            held = [shadow.kv(position) for position in range(start, end)]
            assert self.said.setdefault(key, held) == held, "two pages have one key"
        if keys:
            shadow.ends.add(shadow.computed)
        return keys

    def holds(self, page: Page, key: Key) -> bool:
        return page[: len(self.said[key])] == self.said[key]

    # --- sessions ---------------------------------------------------------------------------------------------------

    @precondition(lambda self: len(self.shadows) < 7)
    @rule(owner=st.sampled_from(OWNERS), pick=PICKS)
    def open(self, owner: tuple[int, bytes], pick: int) -> None:
        """Opens a session, possibly with the tokens of another one."""
        shadow, other = self.open_one(owner), self.draw(pick, suits=lambda shadow: shadow.tokens)
        if other is not None:
            shadow.tokens, shadow.ends = list(other.tokens), set(other.ends)

    def open_one(self, owner: tuple[int, bytes]) -> Shadow:
        shadow = Shadow(f"s{next(self.names)}", *owner)
        self.shadows[shadow.name] = shadow
        return shadow

    @rule(pick=PICKS, new=st.lists(st.integers(0, 1), max_size=9))
    def compute(self, pick: int, new: list[int]) -> None:
        shadow = self.draw(pick)
        if shadow is not None:
            self.go_on(shadow, new)

    def go_on(self, shadow: Shadow, new: list[int]) -> None:
        """Computes all tokens without KV, and new ones. KV that is found on the device is not computed again."""
        tokens = [*shadow.tokens, *new][:MAX_CONTEXT]
        kv, name, most, computed = self.kv, shadow.name, max(len(tokens) - 1, 0), shadow.computed
        if most // self.size > shadow.computed // self.size:
            shadow.computed = kv.adopt(name, shadow.tenant, tokens, shadow.computed, most, shadow.salt)
        try:
            kv.reserve(name, shadow.tenant, len(tokens))
        except OutOfPages:
            shadow.tokens = tokens[: max(shadow.computed, len(shadow.tokens))]
            return
        shadow.tokens = tokens
        if shadow.computed > computed:
            self.paging.mark_returned(self.keys(shadow)[computed // self.size :])
        for page in kv.pool.take_stale():
            self.device[page] = [None] * self.size
        pages = kv.pages_of(name)
        for page in pages:
            assert {kv.origin for kv in self.page(page) if kv} <= self.tenants(shadow), f"{name} could read another's"
        for position in range(shadow.computed, len(tokens)):
            page = pages[position // self.size]
            assert kv.may_write(page), "a session writes into a page that others hold, or find"
            self.page(page)[position % self.size] = shadow.kv(position)
        shadow.computed = len(tokens)
        if tokens:
            kv.publish(name, shadow.tenant, tokens, shadow.computed, shadow.salt)

    def tenants(self, shadow: Shadow) -> set[Key]:
        return {root(tenant, salt) for tenant, salt in OWNERS if tenant == shadow.tenant}

    @precondition(lambda self: len(self.shadows) < 7)
    @rule(pick=PICKS)
    def fork(self, pick: int) -> None:
        parent = self.draw(pick)
        if parent is None:
            return
        child = Shadow(f"s{next(self.names)}", parent.tenant, parent.salt, list(parent.tokens), ends=set(parent.ends))
        child.computed, copy = self.kv.fork(parent.name, child.name, child.tenant, parent.computed)
        if copy is not None:
            self.device[copy.target] = list(self.page(copy.source))
        self.shadows[child.name] = child

    @rule(pick=PICKS, less=st.integers(0, MAX_CONTEXT))
    def cut(self, pick: int, less: int) -> None:
        shadow = self.draw(pick, suits=lambda shadow: True)
        if shadow is not None:
            del shadow.tokens[max(len(shadow.tokens) - less, 0) :]
            self.rewind(shadow, min(shadow.computed, len(shadow.tokens)))

    @rule(pick=PICKS)
    def change_mind(self, pick: int) -> None:
        """Replaces the last token."""
        shadow = self.draw(pick, suits=lambda shadow: shadow.tokens and not shadow.arrival)
        if shadow is not None:
            last = shadow.tokens.pop()
            self.rewind(shadow, min(shadow.computed, len(shadow.tokens)))
            self.go_on(shadow, [1 - last])

    def rewind(self, shadow: Shadow, computed: int) -> None:
        self.come_no_further(shadow)
        shadow.computed = self.kv.trim(shadow.name, computed)

    @rule(pick=PICKS)
    def close(self, pick: int) -> None:
        shadow = self.draw(pick, suits=lambda shadow: True)
        if shadow is not None:
            self.come_no_further(shadow)
            self.kv.drop(shadow.name)
            del self.shadows[shadow.name]

    def come_no_further(self, shadow: Shadow) -> None:
        arrival, shadow.arrival = shadow.arrival, None
        if arrival is None or arrival[0] not in self.transfers:
            return
        transfer = arrival[0]
        self.paging.moves.drop(transfer)
        self.taken = [move for move in self.taken if not (move.is_queued and move.is_dropped)]
        if transfer.is_over:
            self.transfers.pop(transfer)

    @precondition(lambda self: not self.paging.is_busy)
    @rule(pages=st.integers(2, 12))
    def resize(self, pages: int) -> None:
        if pages >= self.kv.pool.used:
            places = self.kv.resize(pages + 1)
            self.device = {places[page]: held for page, held in self.device.items() if page in places}
            self.pages = pages

    # --- pages move -------------------------------------------------------------------------------------------------

    def note(self, transfer: Transfer, leaves: bool = False) -> None:
        if transfer.is_over:
            self.end(transfer, leaves)
        else:
            self.transfers[transfer] = leaves

    @rule(pick=PICKS, sealed=st.booleans(), leaves=st.booleans())
    def save(self, pick: int, sealed: bool, leaves: bool) -> None:
        shadow = self.draw(pick, suits=lambda shadow: shadow.computed and not shadow.arrival)
        if shadow is not None:
            keys = self.keys(shadow)
            transfer = self.paging.save(shadow.name, keys, shadow.computed, sealed=sealed)
            assert self.paging.host
            assert transfer.failed or all(key in self.paging.host for key in keys), "a page has not been saved"
            assert not any(self.paging.host.is_spare(self.paging.host.peek(key)) for key in keys), (
                "it is used, and spare"
            )
            self.note(transfer, leaves)

    @rule(pick=PICKS)
    def is_back(self, pick: int) -> None:
        """Any pages on the device: not all of them came from the host, and the host may not have all."""
        shadow = self.draw(pick, suits=lambda shadow: shadow.computed and not shadow.arrival)
        if shadow is not None:
            keys = self.keys(shadow)
            self.paging.mark_returned(keys)
            host = self.paging.host
            assert host
            assert all(host.is_spare(slot) for key in keys if (slot := host.peek(key)) is not None)

    @rule(pick=PICKS, leaves=st.booleans())
    def save_freely(self, pick: int, leaves: bool) -> None:
        """Predicts what the host loses by a save, and checks it."""
        shadow = self.draw(pick, suits=lambda shadow: shadow.computed and not shadow.arrival)
        if shadow is None:
            return
        host, disk, keys = self.paging.host, self.paging.disk, self.keys(shadow)
        assert host
        before, had = host.keys(), host.oldest(host.capacity)
        elsewhere = {host.key(slot) for slot in host.complete_slots if host.is_spare(slot)}
        elsewhere |= disk.keys() if disk is not None else set()
        free = self.paging.saves_without_loss(keys, shadow.tenant)
        assert host.oldest(host.capacity) == had, "to ask is not a use"
        transfer = self.paging.save(shadow.name, keys, shadow.computed)
        lost = before - host.keys() - elsewhere
        self.note(transfer, leaves)
        assert free == (not transfer.failed and not lost), f"{free}, failed: {transfer.failed}, lost: {len(lost)}"

    @rule(pick=PICKS, less=st.integers(0, 2))
    def load(self, pick: int, less: int) -> None:
        """Loads one of the sessions of which tiers have something."""
        shadow = self.draw(pick, suits=lambda shadow: not shadow.arrival and self.find(shadow, less).keys)
        if shadow is None:
            return
        found = self.find(shadow, less)
        assert found.tokens <= max(len(shadow.tokens) - less, shadow.computed)
        if found.tokens <= shadow.computed or found.on_the_way or len(found.keys) > self.kv.pool.free:
            return
        self.rewind(shadow, found.start)
        transfer = self.paging.load(shadow.name, shadow.tenant, found)
        assert transfer.missing or self.paging.is_busy, "nothing comes, and nothing is waited for"
        if transfer.missing:
            shadow.arrival = (transfer, found.keys[: transfer.missing])
            self.note(transfer)

    def find(self, shadow: Shadow, less: int) -> Found:
        computed, most = shadow.computed, len(shadow.tokens) - less
        return self.paging.find(shadow.name, shadow.origin, shadow.tokens, computed, most, sorted(shadow.ends))

    @rule(lost=st.booleans())
    def leave_all(self, lost: bool) -> None:
        """Every session leaves with all its pages. `lost`: these are then evicted from the host, and only on disk."""
        for shadow in [shadow for shadow in self.shadows.values() if shadow.computed and not shadow.arrival]:
            keys = self.keys(shadow)
            self.note(self.paging.save(shadow.name, keys, shadow.computed, sealed=True), leaves=True)
            if self.slots["disk"] and lost:
                self.drain()
                self.note(self.paging.write_out(shadow.name, keys))
                self.drain()
                self.paging.forget_on_host(keys)

    @precondition(lambda self: self.slots["disk"])
    @rule(pick=PICKS)
    def write_out(self, pick: int) -> None:
        shadow = self.draw(pick)
        if shadow is not None:
            self.note(self.paging.write_out(shadow.name, self.keys(shadow)))

    @precondition(lambda self: self.slots["disk"] and self.paging.host.used)
    @rule(most=st.integers(1, 4))
    def write_out_oldest(self, most: int) -> None:
        host, begun = self.paging.host, set(self.paging.moves.writing_out)
        assert host and self.paging.write_out_oldest(most) <= most
        new = self.paging.moves.writing_out.keys() - begun
        assert not any(host.is_spare(host.peek(key)) for key in new), "it is on the device, and is written out"

    @precondition(lambda self: self.slots["disk"])
    @rule(pick=PICKS)
    def forget_on_host(self, pick: int) -> None:
        shadow = self.draw(pick, suits=lambda shadow: shadow.computed)
        if shadow is not None:
            self.paging.forget_on_host(self.keys(shadow))

    # --- tenants ----------------------------------------------------------------------------------------------------

    @rule(name=st.sampled_from(["host", "disk"]), tenant=st.integers(0, 1), slots=st.none() | st.integers(0, 6))
    def limit(self, name: str, tenant: int, slots: int | None) -> None:
        others = {key: slot for key, slot in self.slots_of(name).items() if key != tenant}
        limit_tenant(self.tenancies[name], tenant, slots)
        assert {key: slot for key, slot in self.slots_of(name).items() if key != tenant} == others
        self.limits.pop((name, tenant), None)
        if slots is not None:
            self.limits[name, tenant] = slots
            self.most[name, tenant] = max(slots, self.tenancies[name].used_by(tenant))

    def slots_of(self, name: str) -> dict[int, set[int]]:
        """Slots by tenant."""
        tier = self.tier(name)
        tenants = tier.tenants if tier is not None else {}
        return {tenant: {slot for slot in tenants if tenants[slot] == tenant} for tenant in set(tenants.values())}

    @invariant()
    def tenants_have_what_they_may(self) -> None:
        held: dict[int, set[int]] = {}
        for shadow in self.shadows.values():
            held.setdefault(shadow.tenant, set()).update(self.kv.pages_of(shadow.name))
        uses = self.kv.pool.uses()
        assert all(uses.get(tenant, 0) >= len(pages) for tenant, pages in held.items())
        moving = {page for page in self.kv.protected if self.kv.holders(page) == 0}
        assert sum(uses.values()) == sum(map(len, held.values())) + len(moving)
        for name, tenancy in self.tenancies.items():
            slots, tier = self.slots_of(name), self.tier(name)
            assert tenancy.uses() == {tenant: len(own) for tenant, own in slots.items()}
            for slot in () if tier is None else tier.complete_slots:
                assert tier is not None
                origin = self.said[tier.key(slot)][0].origin
                assert origin in {root(*owner) for owner in OWNERS if owner[0] == tier.tenants[slot]}
            for (limited, tenant), limit in self.limits.items():
                if limited == name:
                    most, used = self.most[name, tenant], tenancy.used_by(tenant)
                    self.most[name, tenant] = max(limit, min(most, used))
                    assert used <= most, f"tenant {tenant} has more than it may on {name}"

    # --- the copies -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.paging.moves._waiting)
    @rule(most=st.integers(1, 6))
    def take(self, most: int) -> None:
        for move in self.paging.moves.take(most):
            move.is_queued = (most + len(self.taken)) % 2 == 0
            self.taken.append(move)
            if move.direction is Direction.DEMOTE:
                assert self.holds(self.page(move.source), move.key), "what is to be copied is not there"

    @precondition(lambda self: self.taken)
    @rule(pick=PICKS)
    def land(self, pick: int) -> None:
        self.land_move(self.taken.pop(pick % len(self.taken)))

    def land_move(self, move: Move) -> None:
        """Lands a move as the copier does: bytes that have a checksum are checked first."""
        source, target = move.source, move.target
        match move.direction:
            case Direction.DEMOTE:
                bytes_ = list(self.page(source))
                assert self.holds(bytes_, move.key), "a page was written, or given away, while it was copied"
            case Direction.PROMOTE | Direction.WRITE_OUT:
                bytes_ = list(self.memory["host"][source])
            case Direction.FETCH:
                bytes_ = list(self.memory["disk"][source])
        if move.checksum is not None and summed(bytes_) != move.checksum:
            name = "disk" if move.direction is Direction.FETCH else "host"
            assert source in self.bad[name], "good bytes were found to be bad"
            self.fail_move(move, bad=True)
            return
        assert self.holds(bytes_, move.key), "bytes that nobody looked at are not what they were"
        match move.direction:
            case Direction.PROMOTE:
                self.device[target] = bytes_
            case Direction.WRITE_OUT:
                self.write("disk", target, bytes_)
            case Direction.DEMOTE | Direction.FETCH:
                self.write("host", target, bytes_)
        if move.direction is not Direction.PROMOTE:
            self.landed.append(move)
        self.end_all(self.paging.moves.landed(move))

    def write(self, name: str, slot: int, bytes_: Page) -> None:
        self.memory[name][slot] = bytes_
        self.bad[name].discard(slot)

    @precondition(lambda self: self.landed)
    @rule(pick=PICKS)
    def seal(self, pick: int) -> None:
        self.seal_move(self.landed.pop(pick % len(self.landed)))

    def seal_move(self, move: Move) -> None:
        memory = self.memory["disk" if move.direction is Direction.WRITE_OUT else "host"]
        self.end_all(self.paging.moves.sealed(move, summed(memory[move.target])))

    @precondition(lambda self: self.taken)
    @rule(pick=PICKS, bad=st.booleans())
    def fail(self, pick: int, bad: bool) -> None:
        self.fail_move(self.taken.pop(pick % len(self.taken)), bad)

    def fail_move(self, move: Move, bad: bool) -> None:
        """Fails a move. A slot that was its target then holds anything; a device page keeps its bytes."""
        if move.direction is not Direction.PROMOTE:
            self.write("disk" if move.direction is Direction.WRITE_OUT else "host", move.target, [None] * self.size)
        self.end_all(self.paging.moves.failed(move, bad=bad))

    @precondition(lambda self: self.taken or self.paging.is_busy)
    @rule()
    def run_all(self) -> None:
        self.drain()

    def drain(self) -> None:
        while self.paging.is_busy:
            self.take(100)
            while self.taken:
                self.land_move(self.taken.pop())
            while self.landed:
                self.seal_move(self.landed.pop())

    def end_all(self, transfers: list[Transfer]) -> None:
        for transfer in transfers:
            assert transfer.is_over
            self.end(transfer, self.transfers.pop(transfer))  # KeyError would mean that it had ended before

    def end(self, transfer: Transfer, leaves: bool) -> None:
        shadow = self.shadows.get(transfer.session)
        if shadow is None:
            return
        if shadow.arrival is not None and shadow.arrival[0] is transfer:
            keys, shadow.arrival = shadow.arrival[1], None
            if transfer.failed:
                self.rewind(shadow, shadow.computed)
            else:
                self.kv.arrived(shadow.name, keys, transfer.tokens)
                self.paging.mark_returned(keys)
                assert transfer.tokens > shadow.computed
                shadow.computed = transfer.tokens
        elif leaves:
            self.rewind(shadow, 0)

    # --- accidents --------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.paging.disk and self.paging.disk.used)
    @rule(pick=PICKS)
    def decay_on_disk(self, pick: int) -> None:
        self.decay("disk", pick)

    def decay(self, name: str, pick: int) -> None:
        tier = self.tier(name)
        assert tier is not None
        complete = [slot for slot in range(tier.capacity) if slot in tier._order]
        if complete:
            slot = complete[pick % len(complete)]
            self.memory[name][slot] = [*self.memory[name][slot][:-1], Written(b"noise", ())]
            self.bad[name].add(slot)

    @rule(pick=PICKS, decays=st.booleans())
    def die(self, pick: int, decays: bool) -> None:
        """The process dies in mid-copy. The next one has the tables, the tokens of the sessions, and the bytes in the
        slots."""
        for move in self.taken:
            if move.direction is not Direction.PROMOTE:
                self.write("disk" if move.direction is Direction.WRITE_OUT else "host", move.target, [None] * self.size)
        self.tables = {name: bytearray(table) for name, table in self.tables.items()}
        for shadow in self.shadows.values():
            shadow.computed, shadow.arrival = 0, None
        self.start()
        if decays:
            self.decay("host", pick)

    @rule(seed=st.integers(0, 1 << 32), steps=st.integers(1, 100))
    def bustle(self, seed: int, steps: int) -> None:
        """Many random events in one rule."""
        choice = Random(seed)

        def pick() -> int:
            return choice.randrange(100)

        common: list[Callable[[], None]] = [
            lambda: self.compute(pick(), choice.choices([0, 1], [4, 1], k=pick() % 6)),
            lambda: self.save(pick(), choice.random() < 0.3, choice.random() < 0.8),
            lambda: self.load(pick(), choice.choice([0, 0, 0, 1])),
            lambda: self.load(pick(), 0),
            lambda: self.save_freely(pick(), choice.random() < 0.8),
            lambda: self.take(4),
            lambda: self.land(pick()) if self.taken else None,
            lambda: self.land(pick()) if self.taken else None,
            lambda: self.seal(pick()) if self.landed else None,
        ]
        rare: list[Callable[[], None]] = [
            lambda: self.open(choice.choice(OWNERS), pick()) if len(self.shadows) < 7 else None,
            lambda: self.fork(pick()) if len(self.shadows) < 7 else None,
            lambda: self.cut(pick(), choice.randrange(6)),
            lambda: self.is_back(pick()),
            lambda: self.change_mind(pick()),
            lambda: self.close(pick()) if len(self.shadows) > 4 else None,
            lambda: self.write_out(pick()) if self.paging.disk else None,
            lambda: self.forget_on_host(pick()) if self.paging.disk else None,
            lambda: self.decay_on_disk(pick()) if self.paging.disk else None,
            lambda: self.write_out_oldest(3),
            lambda: self.limit(choice.choice(["host", "disk"]), pick() % 2, choice.choice([None, 0, 1, 3, 6])),
            lambda: self.die(pick(), decays=True) if choice.random() < 0.2 else None,
            lambda: self.fail(pick(), choice.random() < 0.5) if self.taken else None,
        ]
        for _ in range(steps):
            choice.choice(common if choice.random() < 0.8 else rare)()
            self.agrees()
            self.tiers_hold_what_they_say()
            self.what_arrives_has_a_page_of_its_own()
            self.tenants_have_what_they_may()

    # --- what always holds ------------------------------------------------------------------------------------------

    @invariant()
    def agrees(self) -> None:
        self.kv.check_integrity()
        self.paging.check_integrity()
        for shadow in self.shadows.values():
            pages = self.kv.pages_of(shadow.name)
            if shadow.arrival is None:
                assert len(pages) == self.kv.pages_for(shadow.computed)
            for position in range(shadow.computed):
                held = self.page(pages[position // self.size])[position % self.size]
                assert held == shadow.kv(position), f"{shadow.name} has {held} at {position}"

    @invariant()
    def tiers_hold_what_they_say(self) -> None:
        for name, memory in self.memory.items():
            tier = self.tier(name)
            for slot in () if tier is None else tier._order:
                if slot not in self.bad[name]:
                    assert self.holds(memory[slot], tier.key(slot)) and summed(memory[slot]) == tier.checksum(slot)

    @invariant()
    def what_arrives_has_a_page_of_its_own(self) -> None:
        for move in [*self.taken, *self.landed]:
            if move.direction in (Direction.PROMOTE, Direction.FETCH):
                page = move.target if move.direction is Direction.PROMOTE else move.page
                holders = [shadow for shadow in self.shadows.values() if page in self.kv.pages_of(shadow.name)]
                assert len(holders) <= 1 and all(shadow.arrival for shadow in holders)

    def teardown(self) -> None:
        """Every transfer ends. When the sessions are closed, every page is free."""
        if not hasattr(self, "paging"):
            return
        self.drain()
        assert not self.transfers, "a transfer never ends"
        self.agrees()
        for name in self.shadows:
            self.kv.drop(name)
        assert self.kv.pool.used == 0 and not self.kv.protected
        for tier in (self.paging.host, self.paging.disk):
            assert tier is None or not tier._pins


class TestPaging(PagingMachine.TestCase):
    settings = settings(max_examples=25, stateful_step_count=40)


@pytest.mark.long
class TestPagingAtLength(PagingMachine.TestCase):
    settings = settings(max_examples=100, stateful_step_count=40)
