"""Copies one model's pages over the bus.

Neighbouring pages that go to neighbouring slots are one copy. The limit of bytes in flight is high enough to keep the
bus busy between two steps. If weights stream, it is low enough to leave the bus to the ring. Copies that no call waits
for are held to a rate while other sessions decode (copy_queue.py).

If the device is idle, a step is launched behind the last copies that its session waits for: see `follow`. The last
pages then come in halves, so the step computes the first blocks while the KV of the others is still being copied:

    lane UP   … pages whole │ first halves of the last pages │ second halves            │
    compute                   (the step is launched)         │ blocks before the middle │ other blocks
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from djinnd.device import CopyLane, Device, Event, StreamMark
from djinnd.engine.memory.host_pages import HostPages
from djinnd.engine.tuning import AHEAD_S, COPY_BYTES, HALF_BYTES, HELD_BYTES, IN_FLIGHT, IN_FLIGHT_STREAMING
from djinnd.kvcache.copy_queue import CopyQueue
from djinnd.kvcache.moves import Direction, Move, Moves, Transfer

_LANES = {Direction.DEMOTE: CopyLane.DOWN, Direction.PROMOTE: CopyLane.UP}


class _Copy(NamedTuple):
    """A queued copy, or several in a row. A step that calls Device.catch_up for the rest may begin after `begins`,
    which covers `nbytes`."""

    event: Event
    moves: list[Move]
    begins: Event
    nbytes: int


@dataclass(eq=False)
class PageCopies:
    """Queues copies of pages and reports their ends. Used by the engine's thread."""

    _device: Device
    _moves: Moves
    _host: HostPages
    _pool: Callable[[], Tensor]  # the current pool, uint8 [pages, page_bytes] on the device
    _half_bytes: int  # beginning of a page that a step needs before it may start, see Device.expect

    def __post_init__(self) -> None:
        self._queued = {direction: CopyQueue() for direction in _LANES}
        self._copies: dict[Direction, deque[_Copy]] = {direction: deque() for direction in _LANES}
        self._bytes = dict.fromkeys(_LANES, 0)  # in flight

    @property
    def has_queued(self) -> bool:
        """True if copies wait to be queued."""
        return any(self._queued.values())

    @property
    def piece_pages(self) -> int:
        return COPY_BYTES // self._host.page_bytes

    @property
    def next(self) -> Event | None:
        """The end of the copy that is expected to end next: the smaller of the lanes' first copies. None if no copy is
        in flight."""
        firsts = [copies[0] for copies in self._copies.values() if copies]
        return min(firsts, key=lambda first: len(first.moves)).event if firsts else None

    def add(self, move: Move) -> None:
        self._queued[move.direction].add(move)

    # --- copies begin -------------------------------------------------------------------------------------------------

    def begin(self, mark: StreamMark, rate: float, *, weights_stream: bool) -> None:
        """Queues copies of added moves after `mark`, up to the limit in flight, which is lower with `weights_stream`.
        `rate`: bytes a second each way for moves that no call waits for."""
        most = IN_FLIGHT_STREAMING if weights_stream else IN_FLIGHT
        pool, now = self._pool(), time.monotonic()
        moves = self._moves
        have_hurried, moves.has_hurried = moves.has_hurried, False
        have_dropped, moves.has_dropped = moves.has_dropped, False
        for direction, queue in self._queued.items():
            if have_dropped:
                queue.drop()
            if have_hurried:
                queue.hurry()
            queue.pace(rate, now)
            alone = direction is Direction.PROMOTE and rate == math.inf and not weights_stream
            halved = self._pages_in_halves() if alone else 0
            while (queued := queue.next) and self._bytes[direction] < most and self._host.is_ready(_slot(queued[0])):
                if len(queued) <= halved and self._is_awaited(queued):
                    run, copy = list(queued), self._copy_in_halves
                    queued.clear()
                else:
                    whole = len(queued) - halved if len(queued) > halved else len(queued)
                    nbytes = HELD_BYTES if queue.holds(queued) else COPY_BYTES
                    run, copy = self._run_of(queued, whole, nbytes), self._copy
                nbytes = len(run) * self._host.page_bytes
                queue.began(queued, run, nbytes)
                self._copies[direction].append(copy(direction, run, pool, mark))
                self._bytes[direction] += nbytes

    def _pages_in_halves(self) -> int:
        """The number of last pages to copy in halves: their first halves take as long as launching a step."""
        return int(self._ahead_bytes / self._half_bytes) if self._half_bytes >= HALF_BYTES else 0

    @property
    def _ahead_bytes(self) -> float:
        return self._device.rates().bus * AHEAD_S

    def _is_awaited(self, queued: deque[Move]) -> bool:
        """True if these moves, with the moves in flight, are the last that a call's transfer waits for."""
        awaited = [transfer for transfer in queued[-1].on_landing if transfer.is_urgent]
        if not awaited or not all(self._host.is_ready(move.source) for move in queued):
            return False
        in_flight = [move for copy in self._unfollowed() for move in copy.moves]
        landing = Counter(transfer for move in (*in_flight, *queued) for transfer in move.on_landing)
        return any(landing[transfer] == transfer.missing for transfer in awaited)

    def _run_of(self, queued: deque[Move], pages: int, nbytes: int) -> list[Move]:
        """Takes the first move and the moves after it that are its neighbours in both places: at most `pages`, and at
        most `nbytes` together."""
        moves = [queued.popleft()]
        most = min(pages, nbytes // self._host.page_bytes) if self._host.is_dense else 1
        while queued and len(moves) < most:
            last, move = moves[-1], queued[0]
            slot = _slot(move)
            if (move.source, move.target) != (last.source + 1, last.target + 1) or slot % self._host.piece_slots == 0:
                break
            moves.append(queued.popleft())
        return moves

    def _copy(self, direction: Direction, moves: list[Move], pool: Tensor, after: StreamMark) -> _Copy:
        first, count = moves[0], len(moves)
        slots = self._host.slots(_slot(first), count)
        if direction is Direction.DEMOTE:
            target, source = slots, pool[first.source : first.source + count]
        else:
            target, source = pool[first.target : first.target + count], slots
        event = self._device.copy(target, source, after, f"{direction.value} {count}", _LANES[direction])
        return _Copy(event, moves, event, slots.numel())

    def _copy_in_halves(self, direction: Direction, moves: list[Move], pool: Tensor, after: StreamMark) -> _Copy:
        """To the device, first halves before second halves. Each page is a copy by itself, because the halves of
        neighbours are not contiguous."""
        ends, events = [(pool[move.target], self._host.slot(move.source)) for move in moves], list[Event]()
        for which, half in (("first", slice(self._half_bytes)), ("second", slice(self._half_bytes, None))):
            name = f"{direction.value} {which} half"
            events += [self._device.copy(page[half], slot[half], after, name, _LANES[direction]) for page, slot in ends]
        return _Copy(events[-1], moves, events[len(moves) - 1], len(moves) * self._half_bytes)

    # --- copies end ---------------------------------------------------------------------------------------------------

    def end(self) -> list[tuple[list[Move], str]]:
        """The moves of copies that have ended, each with its error or "". Does not block."""
        over = []
        for direction, copies in self._copies.items():
            while copies and (outcome := self._outcome(copies[0].event)) is not None:
                moves = copies.popleft().moves
                self._bytes[direction] -= len(moves) * self._host.page_bytes
                over.append((moves, outcome))
        return over

    def _outcome(self, event: Event) -> str | None:
        """The copy's error, "" if it succeeded, None while it is under way."""
        try:
            return "" if event.has_passed() else None
        except Exception as error:
            self._device.synchronize()  # raises again if the error is permanent, and so ends the engine
            return repr(error)

    def follow(self) -> list[Move]:
        """Orders the compute stream after the last copies of a transfer, if they end soon: see Transfers.follow. → the
        moves of these copies, which are done for all work that is queued from now on."""
        copies = self._last()
        try:
            for copy in copies:
                copy.begins.order()
                if copy.begins is not copy.event:
                    self._device.expect(copy.event)
        except Exception:
            return []  # `end` reports it
        return [move for copy in copies for move in copy.moves]

    def _last(self) -> list[_Copy]:
        """The next copies to the device, up to the first that completes a transfer. Empty if they take longer than
        AHEAD_S: a step is not launched so early."""
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
        return [copy for copy in self._copies[Direction.PROMOTE] if not copy.moves[0].is_followed]


def _slot(move: Move) -> int:
    return move.target if move.direction is Direction.DEMOTE else move.source
