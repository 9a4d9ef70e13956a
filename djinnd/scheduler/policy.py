"""What a step has room for, who gives way, and when an idle session leaves: small pure functions and values."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from djinn_client.protocol import CLASSES, Class
from djinnd.core.batch import Row
from djinnd.core.session import Session
from djinnd.scheduler.step_times import StepTimes

QUIET_S = 10.0  # after which a session whose client says nothing leaves the device
CROWDED_QUIET_S = 1.0  # the same while pages are scarce
SCARCE = 0.1  # of the pool: fewer are free
BRIEF = 128  # tokens: who has more to read before its next one comes after those who have not
# Tokens of prefill that join those that decode in the same class in any case, of one prompt or of several. Beside seven
# rows of 13B an H200 takes 0.2 ms more for 9 and 1.2 for 57: several small parts would make who reads wait for more
# steps, and those who decode gain hardly anything at p99 (docs/log.md).
LEAST_CHUNK = 64
# The next call of a class may come at any time for so many seconds after one, and a step cannot be interrupted: until
# then lower classes take the device for as long as so many steps of one row, at most.
LATELY_S = 10.0
BUSY_STEPS = 3.0
# Where those that decode take longer by themselves than `Policy.slowdown` allows for, prompts of their class make the
# step at most so many times as long, and lower classes so many: these have other steps.
CROWDED_SLOWDOWN = 1.1
CROWDED_BY_LOWER = 1.05

# Who has to read and has had no row for longer than this slows down those that decode in its class: a step may take as
# many times longer as it has waited such times. Else each of them would have its tokens in time, and wake-ups would
# wait for one another without end. Not in the highest class, where somebody reads each token as it comes. A step that
# is longer than INDULGENCE times reads hardly more a second, and who waits for pages waits the longer for it.
PATIENCE_S = 0.25
INDULGENCE = 3.0
NOBODY: Mapping[Class, float] = {}


@dataclass(frozen=True, slots=True)
class Policy:
    """`slowdown`: times the step of one row, as which a step may take by what joins sessions that decode; if these take
    longer, see CROWDED_SLOWDOWN. `between_tokens`: seconds that it may take in any case; `ageing`: seconds, see
    ageing.py. `paging`: of the bus each way, what pages may take that no call waits for, beside steps that decode for
    somebody (`is_spared`)."""

    slowdown: float = 1.25
    between_tokens: float = 0.0
    ageing: float = 10.0
    paging: float = 0.25


DEFAULT = Policy()


def is_spared(row: Row) -> bool:
    """It decodes, and its session's time between tokens counts."""
    return row.count == 1 and row.session.klass != CLASSES[-1] and not row.session.bulk


def has_gone_quiet(seconds: float, free: float, *, called: bool = False) -> bool:
    """Whether an idle session leaves, of which nobody has heard for so long; `free`: share of the pool; `called`: it
    has just been brought back for what it is to do. Its pages stay where they are as long as nobody else needs them, so
    coming back costs little."""
    return seconds >= (CROWDED_QUIET_S if free < SCARCE and not called else QUIET_S)


def eviction_order(idle: Iterable[Session], held: Iterable[Session], order: list[Session]) -> Iterator[Session]:
    """Whose pages make room, first to last: the idle, those first whose client waits for something else, those last
    that have been called, of these the lowest class, whose client is expected last, least recently touched first; then
    those whose client reads too slowly or who are paused, least recently touched first; then of the serving `order` the
    last."""
    yield from sorted(idle, key=_worth)
    yield from sorted(held, key=_touched)
    yield from reversed(order)


def _worth(session: Session) -> tuple[bool, bool, bool, int, float, int]:
    """KV that a client gave goes last: it cannot be computed."""
    rank = -CLASSES.index(session.klass)  # the lowest class is the last of them
    given = bool(session.foreign_tokens)
    return given, not session.waits, session.called, rank, -session.wakes_at, session.touched


def _touched(session: Session) -> int:
    return session.touched


class KvRead(NamedTuple):
    """Tokens of KV that a session of a class reads for a token, on average: of those that decode now, and usually."""

    now: float = 0.0
    usual: float = 0.0


UNKNOWN: Mapping[Class, KvRead] = {}


class Room:
    """What a step can still take, in rows, tokens and seconds, while sessions are asked in their order.

    Those of a class that need one token decode together, and chunks of its prompts get what those leave; lower classes
    get what it leaves. The first that is asked has a token in any case, if nobody protected decodes.

    Protected is the time between tokens: of a class that decodes, from lower classes and from chunks of its own;
    where nobody decodes, of a prompt that is read, from lower classes. With them, a step that decodes may take
    `slowdown` times as long as one of a single row does, and one that reads so many times as long as without them;
    while nobody knows how long that is, they stay out of it until it has been measured. Those rows take what reading
    their class's usual KV takes: where that of the sessions at hand is longer, who joins makes way. Who may call in a
    moment is protected from finding the device busy with lower classes for long. Nobody is protected in the lowest
    class, nor who has said that it works in bulk. Where reading the weights takes the time, as with a streamed model,
    joining costs nothing, and all join.
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
        waited: Mapping[Class, float] = NOBODY,
        kv: Mapping[Class, KvRead] = UNKNOWN,
    ) -> None:
        """`decoding`: sessions by class that need one token, which read so much `kv`; `protected`: of these, those that
        are. `lately`: classes of which somebody may call in a moment. `waited`: seconds, for a row, of who has waited
        longest to read on."""
        self._times = times
        self._policy = policy
        self._rows = max_rows  # that are left
        self._tokens = max_tokens  # likewise
        self._decoding = dict(decoding)  # that have had no row yet
        self._protected = protected
        self._lately = lately
        self._waited = waited
        self._kv = kv
        self._taken = self._further = 0  # rows, and what they bring beyond one token each
        self._chunks = 0  # of these rows, those of a prompt
        self._decoders = 0  # of these rows, those that decode and that the classes below must not slow down
        self._kv_decoders = 0.0  # tokens of KV that these usually read; those of the class being asked do not count
        self._before = self._decoders_before = 0  # rows that decode, and decoders, when this class was asked first
        self._kv_before = 0.0  # tokens of KV that those rows read
        self._readers = self._read = 0  # likewise those that read a prompt, and their tokens beyond one each
        self._spared = math.inf  # seconds of the step, for the sake of classes that have rows in it
        self._limit = math.inf  # the same for the class that is being asked, also where none of those has
        self._klass = CLASSES[0]
        self._enter(CLASSES[0])

    def _enter(self, klass: Class) -> None:
        self._leave()
        self._klass = klass
        decoders, kv_decoders = self._decoders, self._kv_decoders
        longest = self._longest(decoders, kv_decoders, CROWDED_BY_LOWER) if decoders else self._reading()
        self._spared = min(self._spared, longest)
        self._limit = self._until_free(klass) if self._spared == math.inf else self._spared
        own = min(self._protected[klass], self._rows, self._tokens)
        self._chunk_limit = self._limit
        if own:
            kv_decoders += own * self._kv_read(klass).usual
            longest = self._longest(decoders + own, kv_decoders, CROWDED_SLOWDOWN)
            self._chunk_limit = min(self._limit, longest * self._indulgence(klass))
        self._owed = LEAST_CHUNK if own and self._limit > 0 else 0
        self._measure()

    def _leave(self) -> None:
        """The class that was asked is not any more: what its rows read is counted."""
        kv, decoding = self._kv_read(self._klass), self._taken - self._chunks
        self._kv_before += (decoding - self._before) * kv.now
        self._kv_decoders += (self._decoders - self._decoders_before) * kv.usual
        self._before, self._decoders_before = decoding, self._decoders

    def _kv_read(self, klass: Class) -> KvRead:
        """What is usual protects nobody who reads less now: those who come behind long sessions may be short."""
        kv = self._kv.get(klass, KvRead())
        return KvRead(kv.now, min(kv.now, kv.usual))

    def _longest(self, decoders: int, kv: float, crowded: float) -> float:
        """Seconds that a step may take for the sake of so many rows that decode, and usually read so many tokens of KV.
        0: these are to be measured."""
        if self._times.wants(decoders):
            self._times.ask(decoders)
            return 0.0
        return self._longest_of(self._times.predict(1, kv=kv / decoders), self._times.predict(decoders, kv=kv), crowded)

    def _indulgence(self, klass: Class) -> float:
        """How many times longer than else a step of those that decode may take, for the sake of who has waited."""
        if klass == CLASSES[0]:
            return 1.0
        return min(max(1.0, self._waited.get(klass, 0.0) / PATIENCE_S), INDULGENCE)

    def _reading(self) -> float:
        """The same for the sake of the prompts that are read, where nobody decodes."""
        alone = self._times.predict(self._readers, self._read) if self._readers else 0.0
        return self._longest_of(alone, alone, 1.0)

    def _until_free(self, klass: Class) -> float:
        """Seconds for which the device may be this class's, for the sake of higher ones that have no row."""
        if not any(CLASSES.index(higher) < CLASSES.index(klass) for higher in self._lately):
            return math.inf
        row, least = self._times.predict(1), self._times.predict(1, LEAST_CHUNK - 1)
        return max(BUSY_STEPS * row, least, self._policy.between_tokens) if least else math.inf

    def _longest_of(self, usual: float, alone: float, crowded: float) -> float:
        """Seconds of a step that without those who join takes `alone`; inf where nobody knows."""
        policy = self._policy
        if not alone:
            return math.inf
        return max(policy.slowdown * usual, min(policy.slowdown, crowded) * alone, policy.between_tokens)

    def _measure(self) -> None:
        """What there is room for in this class: rows in the step, and tokens of a chunk beside all of the class that
        decode."""
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
        """Of the chunk that is the last of these rows. What it reads of KV is in what chunks take."""
        decoding = rows - 1 - self._chunks
        kv = self._kv_before + (decoding - self._before) * self._kv_read(self._klass).now
        further = self._times.further_within(seconds, rows, kv) - self._further
        return further + 1 if further > 0 else 0

    @property
    def is_full(self) -> bool:
        return not (self._rows and self._tokens)

    def share(self, klass: Class, remaining: int) -> int:
        """Tokens that this step has room for, of a session that needs `remaining`; 0 where it has none."""
        if klass != self._klass:
            self._enter(klass)
        if self.is_full:
            return 0
        if remaining == 1:
            return int(self._taken < self._most_rows)
        spared = 0 if self._taken else 1  # for the first that is asked
        reserved = min(self._decoding[klass], self._rows - spared, self._tokens - spared)
        if reserved == self._rows:
            return 0
        least = int(not self._taken and not self._owed and self._spared == math.inf)
        return max(min(remaining, self._tokens - reserved, max(self._chunk, least)), 0)

    def ones(self, klass: Class) -> int:
        """Rows of one token that this step has room for."""
        if klass != self._klass:
            self._enter(klass)
        return max(min(self._most_rows - self._taken, self._rows, self._tokens), 0)

    def take_ones(self, klass: Class, count: int, shielding: int) -> None:
        """Uses up so many of `ones`, of sessions that need one token; so many of them shield."""
        if not count:
            return
        self._taken += count
        self._tokens -= count
        self._rows -= count
        if klass != CLASSES[-1]:
            self._decoders += shielding
        self._decoding[klass] -= count

    def take(self, remaining: int, count: int, *, shields: bool) -> None:
        """Uses up `count` tokens, of those that `share` answered for `remaining`."""
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
