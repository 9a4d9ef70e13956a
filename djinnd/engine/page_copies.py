"""One model's pages over the bus: which copies are queued when, and when a step may be launched behind them.

Neighbouring pages that go to neighbouring slots travel as one copy. So much may be in flight in each lane that the bus
is never idle between two steps, and where weights stream, so little that the ring hardly notices. What no call waits
for is held to a rate beside steps that decode (copy_queue.py).

Where the device has nothing else to do, a step is launched behind the last copies of who waits for it: see `follow`.
The last pages come in halves then, and the step computes with the first blocks while the others' KV is on its way:

    lane UP   … pages whole │ first halves of the last pages │ second halves            │
    compute                   (the step is launched)         │ blocks before the middle │ the others
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from djinnd.device import Device, Event, Lane, Mark
from djinnd.engine.host_pages import HostPages
from djinnd.kvcache.copy_queue import CopyQueue
from djinnd.kvcache.moves import Move, Moves, Transfer, Way

PIECE_BYTES = 64 << 20  # of one copy, at most
HELD_BYTES = 16 << 20  # the same of what is held to a rate, so that each step beside has as many of them as the others
IN_FLIGHT = 512 << 20  # bytes in a lane: ten milliseconds of PCIe 5
IN_FLIGHT_BESIDE_RING = 64 << 20
AHEAD_S = 0.004  # from a step's launch until it may begin: that takes 1.4 to 1.7 ms, and of 3 many were late
HALF_BYTES = 2 << 20  # of a page's half, at least: each is a copy of its own
_LANES = {Way.DEMOTE: Lane.DOWN, Way.PROMOTE: Lane.UP}


class _Copy(NamedTuple):
    """Or many of them, one behind the other. A step may begin behind `begins`, of so many of their bytes, if whoever
    computes catches up with the rest."""

    event: Event
    moves: list[Move]
    begins: Event
    nbytes: int


class PageCopies:
    """Used by the engine's thread."""

    def __init__(
        self, device: Device, moves: Moves, host: HostPages, pool: Callable[[], Tensor], half_bytes: int
    ) -> None:
        """`pool`: uint8 [pages, page_bytes] on the device, as it is now. `half_bytes`: of a page, without whose rest a
        step may begin, see Device.expect."""
        self._device = device
        self._moves = moves
        self._host = host
        self._pool = pool
        self._half_bytes = half_bytes
        self._queued = {way: CopyQueue() for way in _LANES}
        self._copies: dict[Way, deque[_Copy]] = {way: deque() for way in _LANES}
        self._bytes = dict.fromkeys(_LANES, 0)  # in flight

    @property
    def has_queued(self) -> bool:
        """Whether some have not begun."""
        return any(self._queued.values())

    @property
    def piece_pages(self) -> int:
        return PIECE_BYTES // self._host.page_bytes

    @property
    def next(self) -> Event | None:
        """Of those that end next, the smaller one; None: nothing is in flight."""
        first = min((copies[0] for copies in self._copies.values() if copies), key=_size, default=None)
        return None if first is None else first.event

    def add(self, move: Move) -> None:
        self._queued[move.way].add(move)

    # --- they begin -------------------------------------------------------------------------------------------------

    def begin(self, mark: Mark, rate: float, *, beside_ring: bool) -> None:
        """Of what has been added, as much as may be in flight: after `mark`. `rate`: bytes a second each way, of what
        no call waits for. `beside_ring`: weights stream."""
        most = IN_FLIGHT_BESIDE_RING if beside_ring else IN_FLIGHT
        pool, now = self._pool(), time.monotonic()
        moves = self._moves
        have_hurried, moves.has_hurried = moves.has_hurried, False
        have_dropped, moves.has_dropped = moves.has_dropped, False
        for way, queue in self._queued.items():
            if have_dropped:
                queue.drop()
            if have_hurried:
                queue.hurry()
            queue.pace(rate, now)
            alone = way is Way.PROMOTE and rate == math.inf and not beside_ring
            halved = self._pages_in_halves() if alone else 0
            while (queued := queue.next) and self._bytes[way] < most and self._host.is_ready(_slot(queued[0])):
                if len(queued) <= halved and self._is_awaited(queued):
                    run, copy = list(queued), self._copy_in_halves
                    queued.clear()
                else:
                    whole = len(queued) - halved if len(queued) > halved else len(queued)
                    nbytes = HELD_BYTES if queue.holds(queued) else PIECE_BYTES
                    run, copy = self._run_of(queued, whole, nbytes), self._copy
                nbytes = len(run) * self._host.page_bytes
                queue.began(queued, run, nbytes)
                self._copies[way].append(copy(way, run, pool, mark))
                self._bytes[way] += nbytes

    def _pages_in_halves(self) -> int:
        """How many of the last pages come so: as many as take their first halves as long as launching a step does."""
        return int(self._ahead_bytes / self._half_bytes) if self._half_bytes >= HALF_BYTES else 0

    @property
    def _ahead_bytes(self) -> float:
        return self._device.rates().bus * AHEAD_S

    def _is_awaited(self, queued: deque[Move]) -> bool:
        """Whether these are all that is missing, beside what is in flight, of what a call waits for."""
        awaited = [transfer for transfer in queued[-1].on_landing if transfer.is_urgent]
        if not awaited or not all(self._host.is_ready(move.source) for move in queued):
            return False
        in_flight = [move for copy in self._unfollowed() for move in copy.moves]
        landing = Counter(transfer for move in (*in_flight, *queued) for transfer in move.on_landing)
        return any(landing[transfer] == transfer.missing for transfer in awaited)

    def _run_of(self, queued: deque[Move], pages: int, nbytes: int) -> list[Move]:
        """The first of them, and those after it that lie beside it at both ends: at most so many, and of so many bytes
        together."""
        moves = [queued.popleft()]
        most = min(pages, nbytes // self._host.page_bytes) if self._host.is_dense else 1
        while queued and len(moves) < most:
            last, move = moves[-1], queued[0]
            slot = _slot(move)
            if (move.source, move.target) != (last.source + 1, last.target + 1) or slot % self._host.piece_slots == 0:
                break
            moves.append(queued.popleft())
        return moves

    def _copy(self, way: Way, moves: list[Move], pool: Tensor, after: Mark) -> _Copy:
        first, count = moves[0], len(moves)
        slots = self._host.slots(_slot(first), count)
        if way is Way.DEMOTE:
            target, source = slots, pool[first.source : first.source + count]
        else:
            target, source = pool[first.target : first.target + count], slots
        event = self._device.copy(target, source, after, f"{way.value} {count}", _LANES[way])
        return _Copy(event, moves, event, slots.numel())

    def _copy_in_halves(self, way: Way, moves: list[Move], pool: Tensor, after: Mark) -> _Copy:
        """To the device. Neighbours are copies of their own: a half of each is no one stretch."""
        ends, events = [(pool[move.target], self._host.slot(move.source)) for move in moves], list[Event]()
        for which, half in (("first", slice(self._half_bytes)), ("second", slice(self._half_bytes, None))):
            name = f"{way.value} {which} half"
            events += [self._device.copy(page[half], slot[half], after, name, _LANES[way]) for page, slot in ends]
        return _Copy(events[-1], moves, events[len(moves) - 1], len(moves) * self._half_bytes)

    # --- they end ---------------------------------------------------------------------------------------------------

    def end(self) -> list[tuple[list[Move], str]]:
        """Those that are over, each with what went wrong, "" if nothing did; waits for nothing."""
        over = []
        for way, copies in self._copies.items():
            while copies and (outcome := self._outcome(copies[0].event)) is not None:
                moves = copies.popleft().moves
                self._bytes[way] -= len(moves) * self._host.page_bytes
                over.append((moves, outcome))
        return over

    def _outcome(self, event: Event) -> str | None:
        """What went wrong with a copy, "" if nothing did; None while it is under way."""
        try:
            return "" if event.has_passed() else None
        except Exception as error:
            self._device.synchronize()  # raises again where the error sticks, and so ends the engine
            return repr(error)

    def follow(self) -> list[Move]:
        """See Transfers.follow. → what is there for whatever the device is given from now on."""
        copies = self._last()
        try:
            for copy in copies:
                copy.begins.order()
                if copy.begins is not copy.event:
                    self._device.expect(copy.event)
        except Exception:
            return []  # `end` finds it
        return [move for copy in copies for move in copy.moves]

    def _last(self) -> list[_Copy]:
        """The next copies to the device, up to the first that ends a transfer, if a step may soon begin behind it."""
        copies = self._unfollowed()
        if not copies:
            return []
        soon = self._ahead_bytes
        landing: Counter[Transfer] = Counter()
        for index, copy in enumerate(copies, 1):
            soon -= copy.nbytes
            if soon < 0:
                break
            landing.update(transfer for move in copy.moves for transfer in move.on_landing)
            if any(transfer.missing == number for transfer, number in landing.items()):
                return copies[:index]
        return []

    def _unfollowed(self) -> list[_Copy]:
        return [copy for copy in self._copies[Way.PROMOTE] if not copy.moves[0].is_followed]


def _slot(move: Move) -> int:
    return move.target if move.way is Way.DEMOTE else move.source


def _size(copy: _Copy) -> int:
    return len(copy.moves)
