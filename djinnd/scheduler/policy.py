"""The rules of scheduling, as pure functions and values: the limits of a step, the order of eviction, and when an idle
session leaves the device."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from djinn_client.protocol import CLASSES, Class
from djinnd.core.batch import Row
from djinnd.core.session import Session
from djinnd.scheduler.timing.step_times import StepTimes

QUIET_S = 10.0  # Seconds without a word from its client, after which an idle session leaves the device.
CROWDED_QUIET_S = 1.0  # the same while free pages are scarce
SCARCE = 0.1  # Free pages are scarce if they are a smaller share of the pool than this.
BRIEF = 128  # Prompt tokens left: sessions with more are scheduled after the others of their class and tenant.
# Prompt tokens, of one or several prompts, that a step takes in any case beside sessions of the same class that decode.
# Beside seven rows of a 13B model, an H200 takes 0.2 ms more for 9 tokens and 1.2 ms more for 57. Smaller parts would
# spread each prompt over more steps, and the p99 time between tokens would hardly improve (docs/log).
LEAST_CHUNK = 64
# For LATELY_S seconds after a session of a class had a request, the next request of that class may come at any time,
# and a step cannot be interrupted. Until then, a step of lower classes takes at most as long as BUSY_STEPS steps of one
# row.
LATELY_S = 10.0
BUSY_STEPS = 3.0
# These apply if the rows that decode take longer by themselves than `Policy.slowdown` allows. Prompts of the same class
# may then make the step CROWDED_SLOWDOWN times as long, and lower classes CROWDED_BY_LOWER times: lower classes can run
# in other steps.
CROWDED_SLOWDOWN = 1.1
CROWDED_BY_LOWER = 1.05

# A session with prompt tokens left may have had no row for longer than PATIENCE_S. Then steps of its class may take t /
# PATIENCE_S times as long as otherwise, where t is the longest such wait in seconds, but at most INDULGENCE times.
# Without this, sessions that decode would all get their tokens in time while sessions that come back waited without
# end. The highest class is exempt, because its tokens are read as they come. Steps longer than INDULGENCE times read
# hardly more tokens a second, and sessions that wait for pages would wait longer.
PATIENCE_S = 0.25
INDULGENCE = 3.0
NO_WAITS: Mapping[Class, float] = {}


@dataclass(frozen=True, slots=True)
class Policy:
    """The configuration's `scheduling` section.

    `slowdown`: the longest step allowed while other sessions decode, as a multiple of a one-row decode step.
    CROWDED_SLOWDOWN applies if the decoding rows alone take longer. `between_tokens`: seconds that a step may take in
    any case. `ageing`: seconds, see ageing.py. `paging`: the share of the bus, each way, that pages without a waiting
    request may take beside steps with protected rows (`is_spared`).
    """

    slowdown: float = 1.25
    between_tokens: float = 0.0
    ageing: float = 10.0
    paging: float = 0.25


DEFAULT = Policy()


def is_spared(row: Row) -> bool:
    """True if the row decodes and the time between its session's tokens is protected."""
    return row.count == 1 and row.session.priority != CLASSES[-1] and not row.session.bulk


def has_gone_quiet(seconds: float, free: float, *, called: bool = False) -> bool:
    """True if an idle session should leave the device after `seconds` without a word from its client.

    `free` is the free share of the pool. `called`: the session has just been brought back for its next request. Pages
    that have left can be found on the device until they are given to another session, so that coming back costs little.
    """
    return seconds >= (CROWDED_QUIET_S if free < SCARCE and not called else QUIET_S)


def eviction_order(idle: Iterable[Session], held: Iterable[Session], order: list[Session]) -> Iterator[Session]:
    """Yields sessions in the order in which they are evicted.

    First come the idle ones: waiting sessions first and called sessions last, KV that a client imported last of all,
    then the lowest class, then the session that is expected back last, then the least recently used. Then come the held
    ones (paused, or with a slow client), the least recently used first. Then come the active ones, in reverse serving
    `order`.
    """
    yield from sorted(idle, key=_worth)
    yield from sorted(held, key=_touched)
    yield from reversed(order)


def _worth(session: Session) -> tuple[bool, bool, bool, int, float, int]:
    """Sort key of an idle session: the lowest is evicted first. KV that a client imported goes last, because it cannot
    be recomputed."""
    rank = -CLASSES.index(session.priority)  # the lowest class is the last of them
    given = bool(session.foreign_tokens)
    return given, not session.waits, session.called, rank, -session.wakes_at, session.touched


def _touched(session: Session) -> int:
    return session.touched


class KvRead(NamedTuple):
    """Tokens of KV that a session of a class reads for one token, on average: of the sessions that decode now, and a
    running mean over past steps (`usual`)."""

    now: float = 0.0
    usual: float = 0.0


UNKNOWN: Mapping[Class, KvRead] = {}


class Room:
    """The room that is left in a step, in rows, tokens and seconds, while sessions are considered in serving order.

    Sessions of a class that need one token decode together. Chunks of the class's prompts get the room that these
    leave, and lower classes get what the class leaves. The first session that is considered gets a token in any case,
    unless protected sessions decode.

    The time between tokens of sessions that decode is protected from lower classes and from prompts of their own class:
    with them, a step may take at most `slowdown` times as long as a one-row decode step. If no session decodes, prompts
    are protected from lower classes: with these, a step may take at most `slowdown` times as long as without. If the
    protected rows' time is not known yet, other rows stay out of the step until it has been measured.

    The limit is computed for the KV length that is usual in the class. If the decoding sessions' KV is longer, fewer
    others join. A class that may get a request at any moment is protected too: lower classes may not take the device
    for long. The lowest class and sessions in bulk mode are not protected. If reading the weights dominates a step, as
    with a streamed model, joining costs nothing and all join.
    """

    def __init__(
        self,
        max_tokens: int,
        max_rows: int,
        times: StepTimes,
        policy: Policy,
        decoding: Mapping[Class, int],
        protected: Mapping[Class, int],
        lately: Collection[Class] = (),
        waited: Mapping[Class, float] = NO_WAITS,
        kv: Mapping[Class, KvRead] = UNKNOWN,
    ) -> None:
        """`decoding`: how many sessions of each class need one token. `protected`: how many of these are protected.
        `lately`: classes that may get a request at any moment. `waited`: for each class, the longest time in seconds
        that a session with prompt tokens left has had no row. `kv`: tokens of KV that the decoding sessions read."""
        self._times = times
        self._policy = policy
        self._rows = max_rows  # rows left
        self._tokens = max_tokens  # tokens left
        self._decoding = dict(decoding)  # sessions that decode and have no row yet, by class
        self._protected = protected
        self._lately = lately
        self._waited = waited
        self._kv = kv
        self._taken = self._further = 0  # rows taken, and their tokens beyond one each
        self._chunks = 0  # rows taken that are chunks of prompts
        self._decoders = 0  # rows taken that decode and that lower classes must not slow down
        self._kv_decoders = 0.0  # tokens of KV that these usually read, without those of the current class
        self._before = self._decoders_before = 0  # decode rows, and protected ones, when the current class was entered
        self._kv_before = 0.0  # tokens of KV that those decode rows read
        self._readers = self._read = 0  # protected rows taken that read a prompt, and their tokens beyond one each
        self._spared = math.inf  # longest step in seconds, for the sake of classes that have rows in it
        self._limit = math.inf  # longest step for the current class, also if no higher class has a row in it
        self._klass = CLASSES[0]
        self._enter(CLASSES[0])

    def _enter(self, priority: Class) -> None:
        """Begins a class, and computes the longest step that its rows and its chunks may make."""
        self._leave()
        self._klass = priority
        decoders, kv_decoders = self._decoders, self._kv_decoders
        longest = self._longest(decoders, kv_decoders, CROWDED_BY_LOWER) if decoders else self._reading()
        self._spared = min(self._spared, longest)
        self._limit = self._until_free(priority) if self._spared == math.inf else self._spared
        own = min(self._protected[priority], self._rows, self._tokens)
        self._chunk_limit = self._limit
        if own:
            kv_decoders += own * self._kv_read(priority).usual
            longest = self._longest(decoders + own, kv_decoders, CROWDED_SLOWDOWN)
            self._chunk_limit = min(self._limit, longest * self._indulgence(priority))
        self._owed = LEAST_CHUNK if own and self._limit > 0 else 0
        self._measure()

    def _leave(self) -> None:
        """Ends the current class: the KV that its rows read is added to the totals."""
        kv, decoding = self._kv_read(self._klass), self._taken - self._chunks
        self._kv_before += (decoding - self._before) * kv.now
        self._kv_decoders += (self._decoders - self._decoders_before) * kv.usual
        self._before, self._decoders_before = decoding, self._decoders

    def _kv_read(self, priority: Class) -> KvRead:
        """KV read by sessions of the class. The usual length counts only up to the current one, so that short sessions
        that follow long ones get no more protection than they need."""
        kv = self._kv.get(priority, KvRead())
        return KvRead(kv.now, min(kv.now, kv.usual))

    def _longest(self, decoders: int, kv: float, crowded: float) -> float:
        """The longest step in seconds for the sake of `decoders` rows that decode and usually read `kv` tokens of KV
        together. 0 if the time of such rows has yet to be measured."""
        if self._times.wants(decoders):
            self._times.ask(decoders)
            return 0.0
        return self._longest_of(self._times.predict(1, kv=kv / decoders), self._times.predict(decoders, kv=kv), crowded)

    def _indulgence(self, priority: Class) -> float:
        """The factor by which steps of the class may take longer because a session with prompt tokens left has
        waited."""
        if priority == CLASSES[0]:
            return 1.0
        return min(max(1.0, self._waited.get(priority, 0.0) / PATIENCE_S), INDULGENCE)

    def _reading(self) -> float:
        """The longest step in seconds for the sake of the prompts that are being read, if no session decodes."""
        alone = self._times.predict(self._readers, self._read) if self._readers else 0.0
        return self._longest_of(alone, alone, 1.0)

    def _until_free(self, priority: Class) -> float:
        """The longest step of this class in seconds, for the sake of higher classes that have no row but may get a
        request at any moment."""
        if not any(CLASSES.index(higher) < CLASSES.index(priority) for higher in self._lately):
            return math.inf
        row, least = self._times.predict(1), self._times.predict(1, LEAST_CHUNK - 1)
        return max(BUSY_STEPS * row, least, self._policy.between_tokens) if least else math.inf

    def _longest_of(self, usual: float, alone: float, crowded: float) -> float:
        """The longest step in seconds: `slowdown` times `usual`, but at least min(slowdown, `crowded`) times `alone`,
        the time of the step without other rows. inf if `alone` is unknown (0)."""
        policy = self._policy
        if not alone:
            return math.inf
        return max(policy.slowdown * usual, min(policy.slowdown, crowded) * alone, policy.between_tokens)

    def _measure(self) -> None:
        """Computes the room of the current class: how many rows the step may have, and how many tokens of a chunk it
        may take beside all sessions of the class that decode."""
        each = self._kv_read(self._klass).now
        kv = self._kv_before - (self._before + self._chunks) * each
        within = self._times.rows_within(self._limit, self._further, kv, each)
        self._most_rows = max(within, int(self._spared == math.inf))
        decoding = min(self._decoding[self._klass], self._rows, max(self._most_rows - self._taken, 0))
        rows = self._taken + decoding + 1
        self._chunk = self._tokens_within(self._chunk_limit, rows)
        if self._owed:
            self._chunk = max(self._chunk, min(self._owed, self._tokens_within(self._limit, rows)))

    def _tokens_within(self, seconds: float, rows: int) -> int:
        """How many tokens a chunk may have, as the last of `rows` rows, in a step of `seconds`. The time to read the
        chunk's own KV is part of what chunks were measured to take."""
        decoding = rows - 1 - self._chunks
        kv = self._kv_before + (decoding - self._before) * self._kv_read(self._klass).now
        further = self._times.further_within(seconds, rows, kv) - self._further
        return further + 1 if further > 0 else 0

    @property
    def is_full(self) -> bool:
        return not (self._rows and self._tokens)

    def share(self, priority: Class, remaining: int) -> int:
        """How many of a session's `remaining` tokens this step has room for; 0 if none."""
        if priority != self._klass:
            self._enter(priority)
        if self.is_full:
            return 0
        if remaining == 1:
            return int(self._taken < self._most_rows)
        # The first session considered gets a token, even if sessions that decode would fill the step.
        spared = 0 if self._taken else 1
        reserved = min(self._decoding[priority], self._rows - spared, self._tokens - spared)
        if reserved == self._rows:
            return 0
        least = int(not self._taken and not self._owed and self._spared == math.inf)
        return max(min(remaining, self._tokens - reserved, max(self._chunk, least)), 0)

    def ones(self, priority: Class) -> int:
        """How many rows of one token this step has room for."""
        if priority != self._klass:
            self._enter(priority)
        return max(min(self._most_rows - self._taken, self._rows, self._tokens), 0)

    def take_ones(self, priority: Class, count: int, shielding: int) -> None:
        """Takes `count` rows of one token, of which `shielding` belong to protected sessions."""
        if not count:
            return
        self._taken += count
        self._tokens -= count
        self._rows -= count
        if priority != CLASSES[-1]:
            self._decoders += shielding
        self._decoding[priority] -= count

    def take(self, remaining: int, count: int, *, shields: bool) -> None:
        """Takes a row of `count` tokens, after `share` was asked for a session with `remaining` tokens. `shields`: the
        session is protected."""
        self._taken += 1
        self._chunks += remaining > 1
        self._further += count - 1
        self._tokens -= count
        self._rows -= 1
        if shields and self._klass != CLASSES[-1]:
            self._decoders += remaining == 1
            self._readers += remaining > 1
            self._read += count - 1
        if remaining == 1:
            self._decoding[self._klass] -= 1
        else:
            self._owed = max(self._owed - count, 0)
            self._measure()
