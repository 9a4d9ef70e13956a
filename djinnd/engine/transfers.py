"""Carries out what Paging has decided: pages between pool, host and disk, beside the steps.

    demote    pool ──lane DOWN──► host slot ─ landed ─ checksum (a thread) ─ sealed
    promote   host slot ─(checksum, where another process has filled it)──lane UP──► pool ─ landed
    write out host slot ──PageFile──► file ─ landed, sealed
    fetch     file ──PageFile, checked──► host slot ─ landed, sealed; then it is promoted

Where the device has nothing else to do, a step is launched behind the last copies of who waits for it: see `follow`.
The last pages come in halves then, and the step computes with the first blocks while the others' KV is on its way:

    lane UP   … pages whole │ first halves of the last pages │ second halves │
    compute                   (the step is launched)         │ blocks before the middle │ the others

Neighbouring pages that go to neighbouring slots travel as one copy. So much may be in flight in each lane that the bus
is never idle between two steps, and where weights stream, so little that the ring hardly notices. What no call waits
for is held to a rate beside steps that decode (copy_queue.py).
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import NamedTuple

from torch import Tensor

from djinnd.device import Device, Event, Lane, Mark
from djinnd.engine.checksums import Checksums
from djinnd.engine.host_pages import HostPages
from djinnd.kvcache.copy_queue import CopyQueue
from djinnd.kvcache.moves import Move, Transfer, Way
from djinnd.kvcache.page_file import BadPage, PageFile
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.tenancy import Tenancy
from djinnd.kvcache.tier import Tier

log = logging.getLogger("djinnd.engine")

PIECE_BYTES = 64 << 20  # of one copy, at most
HELD_BYTES = 16 << 20  # the same of what is held to a rate, so that each step beside has as many of them as the others
IN_FLIGHT = 512 << 20  # bytes in a lane: ten milliseconds of PCIe 5
IN_FLIGHT_BESIDE_RING = 64 << 20
AHEAD_S = 0.003  # from a step's launch until it may begin: that takes 1.4 to 1.7 ms; of pieces of 1.2, two
HALF_BYTES = 2 << 20  # of a page's half, at least: each is a copy of its own
_NAP = 0.0005  # seconds between two looks at what threads do
_LANES = {Way.DEMOTE: Lane.DOWN, Way.PROMOTE: Lane.UP}


class _Copy(NamedTuple):
    event: Event
    moves: list[Move]
    first: Event | None = None  # of pages that come in halves: the first ones are there


class _Job(NamedTuple):
    future: Future[int] | Future[None]  # of a checksum, of what is written to a file
    move: Move


class Transfers:
    """Of one model, used by the engine's thread. Owns the host's pages and the disk's files once they are attached."""

    def __init__(self, device: Device, paging: Paging, pool: Callable[[], Tensor], half_bytes: int) -> None:
        """`pool`: uint8 [pages, page_bytes] on the device, as it is now. `half_bytes`: of a page, without whose rest a
        step may begin, see Device.expect."""
        self.host: HostPages | None = None
        self.disk: PageFile | None = None
        self.disk_rate = 0.0  # bytes a second, as last seen
        self.beside_ring = False
        self._device = device
        self._paging = paging
        self._pool = pool
        self._half_bytes = half_bytes
        self._queued = {way: CopyQueue() for way in _LANES}
        self._copies: dict[Way, deque[_Copy]] = {way: deque() for way in _LANES}
        self._bytes = dict.fromkeys(_LANES, 0)  # in flight
        self._checksums = Checksums()  # of what is to be promoted, and of what has been demoted
        self._filing: list[_Job] = []
        self._fetching_since, self._fetched = 0.0, 0  # since files were last idle: when that was, bytes
        self._mark: Mark | None = None  # of the last turn, if copies may begin
        self._asked = 0  # moves that had been asked for then, and have not begun
        self._failed_at = 0.0  # when a file was last complained about

    def attach_host(self, pages: HostPages, tenancy: Tenancy | None = None) -> None:
        """`tenancy`: see Tier."""
        self.host = pages
        self._paging.use_host(Tier(pages.table, pages.capacity, tenancy, pages.page_bytes, are_ready=False))
        self.note_ready()

    def note_ready(self) -> None:
        """In each turn: copies can go to more of the host's pages. (Who waits for pages does not wait for that: pinning
        makes 0.9 GB/s ready, where a 13B model on an H200 computes 16 GB/s of KV anew.)"""
        if self.host is not None and self._paging.host is not None:
            for slots in self.host.take_ready():
                self._paging.host.make_ready(slots)

    def attach_disk(self, file: PageFile, tenancy: Tenancy | None = None) -> None:
        self.disk = file
        self._paging.use_disk(Tier(file.table, file.slots, tenancy, file.page_bytes))

    # --- a turn of the engine's loop --------------------------------------------------------------------------------

    def turn(self) -> list[Transfer]:
        """Ends what can be, and notes what may begin; waits for nothing. → the transfers that are over."""
        over = self.end()
        self.note_asked()
        return over

    def note_asked(self) -> None:
        """What has been asked for by now may begin."""
        self._asked = self._paging.moves.waiting
        if self._asked or any(self._queued.values()):
            self._mark = self._device.mark()

    def end(self) -> list[Transfer]:
        """Does the books of what has happened, also while a step runs; waits for nothing. → the transfers that are
        over."""
        over: list[Transfer] = []
        if self._paging.is_busy:
            self._end_copies(over)
            self._end_jobs(over)
        return over

    def begin_copies(self, rate: float = math.inf) -> None:
        """Of what had been asked for in the last turn, as much as may be in flight: after what the device had to do by
        then, and beside what it was given since, as nobody is given a page that moves. `rate`: bytes a second each way,
        of what no call waits for."""
        mark, self._mark = self._mark, None
        asked, self._asked = self._asked, 0
        moves = self._paging.moves.take(asked)
        first = 0 if self.host is None else PIECE_BYTES // self.host.page_bytes
        # The first piece does not wait for the books of all.
        for some in (moves[:first], moves[first:]) if len(moves) > first else (moves,):
            for move in some:
                self._begin(move)
            if mark is not None:
                self._queue_copies(mark, rate)

    def follow(self) -> list[Transfer]:
        """For when the device has nothing to do, which would wait for the host to see that copies have ended, and to
        launch what follows. It waits for the copies itself, if they end in the time that launching takes, or their
        first halves do. → the transfers that are over for whatever the device is given from now on."""
        copies = self._last_copies()
        try:
            for copy in copies:
                if copy.first is None:
                    copy.event.order()
                else:
                    copy.first.order()
                    self._device.expect(copy.event)
        except Exception:
            return []  # `turn` finds it
        return [transfer for copy in copies for move in copy.moves for transfer in self._paging.moves.followed(move)]

    def _last_copies(self) -> list[_Copy]:
        """The next copies to the device, up to the first that ends a transfer, if that is soon enough there."""
        copies = [copy for copy in self._copies[Way.PROMOTE] if not copy.moves[0].is_followed]
        if not copies:
            return []
        assert self.host is not None
        soon = self._device.rates().bus * AHEAD_S  # bytes
        landing: Counter[Transfer] = Counter()
        for index, copy in enumerate(copies, 1):
            soon -= len(copy.moves) * (self.host.page_bytes if copy.first is None else self._half_bytes)
            if soon < 0:
                break
            landing.update(transfer for move in copy.moves for transfer in move.on_landing)
            if any(transfer.missing == number for transfer, number in landing.items()):
                return copies[:index]
        return []

    def wait(self) -> None:
        """Until there may be something to do in another turn; for when the device has nothing else to do."""
        first = min((copies[0] for copies in self._copies.values() if copies), key=_size, default=None)
        if first is not None:
            with suppress(Exception):  # `turn` finds it
                first.event.wait()
        else:
            time.sleep(_NAP)

    def settle(self) -> list[Transfer]:
        """Ends all that is under way. → the transfers that are over."""
        over = self.turn()
        while self._paging.is_busy:
            self.begin_copies()
            self.wait()
            over += self.turn()
        return over

    def _begin(self, move: Move) -> None:
        if move.way not in _LANES:
            self._file(move)
        elif move.checksum is not None:
            self._sum(move.source, move)
        else:
            self._queued[move.way].add(move)

    # --- over the bus -----------------------------------------------------------------------------------------------

    def _queue_copies(self, mark: Mark, rate: float) -> None:
        if self.host is None:
            return
        most = IN_FLIGHT_BESIDE_RING if self.beside_ring else IN_FLIGHT
        pool, now = self._pool(), time.monotonic()
        moves = self._paging.moves
        have_hurried, moves.has_hurried = moves.has_hurried, False
        have_dropped, moves.has_dropped = moves.has_dropped, False
        for way, queue in self._queued.items():
            if have_dropped:
                queue.drop()
            if have_hurried:
                queue.hurry()
            queue.pace(rate, now)
            halved = self._pages_in_halves() if way is Way.PROMOTE and rate == math.inf else 0
            while (queued := queue.next) and self._bytes[way] < most and self.host.is_ready(_slot(queued[0])):
                if len(queued) <= halved and self._is_awaited(queued):
                    run, copy = list(queued), self._copy_in_halves
                    queued.clear()
                else:
                    whole = len(queued) - halved if len(queued) > halved else len(queued)
                    nbytes = HELD_BYTES if queue.holds(queued) else PIECE_BYTES
                    run, copy = self._run_of(queued, whole, nbytes), self._copy
                queue.began(queued, run, len(run) * self.host.page_bytes)
                copy(way, run, pool, mark)

    def _pages_in_halves(self) -> int:
        """How many of the last pages come so: as many as take their first halves as long as launching a step does."""
        if self._half_bytes < HALF_BYTES or self.beside_ring:
            return 0
        return int(self._device.rates().bus * AHEAD_S / self._half_bytes)

    def _is_awaited(self, queued: deque[Move]) -> bool:
        """Whether these are all that is missing, beside what is in flight, of what a call waits for."""
        assert self.host is not None
        awaited = [transfer for transfer in queued[-1].on_landing if transfer.is_urgent]
        if not awaited or not all(self.host.is_ready(move.source) for move in queued):
            return False
        in_flight = [move for copy in self._copies[Way.PROMOTE] for move in copy.moves if not move.is_followed]
        landing = Counter(transfer for move in (*in_flight, *queued) for transfer in move.on_landing)
        return any(landing[transfer] == transfer.missing for transfer in awaited)

    def _run_of(self, queued: deque[Move], pages: int, nbytes: int) -> list[Move]:
        """The first of them, and those after it that lie beside it at both ends: at most so many, and of so many bytes
        together."""
        assert self.host is not None
        moves = [queued.popleft()]
        most = min(pages, nbytes // self.host.page_bytes) if self.host.is_dense else 1
        while queued and len(moves) < most:
            last, move = moves[-1], queued[0]
            slot = _slot(move)
            if (move.source, move.target) != (last.source + 1, last.target + 1) or slot % self.host.piece_slots == 0:
                break
            moves.append(queued.popleft())
        return moves

    def _copy(self, way: Way, moves: list[Move], pool: Tensor, after: Mark) -> None:
        assert self.host is not None
        first, count = moves[0], len(moves)
        slots = self.host.slots(_slot(first), count)
        if way is Way.DEMOTE:
            target, source = slots, pool[first.source : first.source + count]
        else:
            target, source = pool[first.target : first.target + count], slots
        event = self._device.copy(target, source, after, f"{way.value} {count}", _LANES[way])
        self._copies[way].append(_Copy(event, moves))
        self._bytes[way] += slots.numel()

    def _copy_in_halves(self, way: Way, moves: list[Move], pool: Tensor, after: Mark) -> None:
        """To the device. Neighbours are copies of their own: a half of each is no one stretch."""
        assert self.host is not None
        ends, events = [(pool[move.target], self.host.slot(move.source)) for move in moves], list[Event]()
        for which, half in (("first", slice(self._half_bytes)), ("second", slice(self._half_bytes, None))):
            name = f"{way.value} {which} half"
            events += [self._device.copy(page[half], slot[half], after, name, _LANES[way]) for page, slot in ends]
        self._copies[way].append(_Copy(events[-1], moves, first=events[len(moves) - 1]))
        self._bytes[way] += len(moves) * self.host.page_bytes

    def _end_copies(self, over: list[Transfer]) -> None:
        assert self.host is not None
        for way, copies in self._copies.items():
            while copies and (outcome := self._outcome(copies[0].event)) is not None:
                moves = copies.popleft().moves
                self._bytes[way] -= len(moves) * self.host.page_bytes
                for move in moves:
                    if outcome:
                        over += self._lose(move, f"{way.value}: {outcome}", bad=way is Way.PROMOTE)
                        continue
                    over += self._paging.moves.landed(move)
                    if way is Way.DEMOTE:
                        self._sum(move.target, move)

    def _outcome(self, event: Event) -> str | None:
        """What went wrong with a copy, "" if nothing did; None while it is under way."""
        try:
            return "" if event.has_passed() else None
        except Exception as error:
            self._device.synchronize()  # raises again where the error sticks, and so ends the engine
            return repr(error)

    # --- in threads -------------------------------------------------------------------------------------------------

    def _sum(self, slot: int, move: Move) -> None:
        assert self.host is not None
        self._checksums.ask(self.host.slot(slot).numpy(), move)

    def _file(self, move: Move) -> None:
        assert self.host is not None and self.disk is not None
        future: Future[int] | Future[None]
        if move.way is Way.WRITE_OUT:
            future = self.disk.write(move.target, self.host.extent(move.source))
        else:
            assert move.checksum is not None
            future = self.disk.read(move.source, self.host.extent(move.target), move.checksum)
        if not self._filing:
            self._fetching_since, self._fetched = time.monotonic(), 0
        self._filing.append(_Job(future, move))

    def _end_jobs(self, over: list[Transfer]) -> None:
        for move, summed in self._checksums.take():
            if move.way is Way.DEMOTE:
                over += self._paging.moves.sealed(move, summed)
            elif summed == move.checksum:
                self._queued[move.way].add(move)
            else:
                over += self._lose(move, "its bytes on the host are not what was written there", bad=True)
        self._filing, filed = _split(self._filing)
        for job in filed:
            over += self._end_filing(job)

    def _end_filing(self, job: _Job) -> list[Transfer]:
        move = job.move
        try:
            summed = job.future.result()
        except BadPage:
            return self._lose(move, "its bytes on disk are not what was written there", bad=True)
        except OSError as error:
            return self._lose(move, f"{move.way.value}: {error}", bad=move.way is Way.FETCH)
        if move.way is Way.WRITE_OUT and summed != move.checksum:
            return self._lose(move, "its bytes on the host are not what was written there", bad=True)
        assert self.disk is not None
        if move.way is Way.FETCH:
            self._fetched += self.disk.page_bytes
            self.disk_rate = self._fetched / (time.monotonic() - self._fetching_since)
            summed = move.checksum
        assert summed is not None
        return self._paging.moves.landed(move) + self._paging.moves.sealed(move, summed)

    def _lose(self, move: Move, why: str, *, bad: bool) -> list[Transfer]:
        """A page less in a tier: it is computed anew when it is needed. One that cannot be read is as good as `bad`:
        whoever needs it would ask for it again and again."""
        now = time.monotonic()
        if bad or now - self._failed_at > 60:
            log.warning("page_lost reason=%r", why)
            self._failed_at = now
        return self._paging.moves.failed(move, bad=bad)

    def close(self) -> None:
        """Nothing is under way."""
        assert not self._paging.is_busy
        self._checksums.close()
        self._paging.close()
        if self.disk is not None:
            self.disk.close()
        if self.host is not None:
            self.host.release()


def _slot(move: Move) -> int:
    return move.target if move.way is Way.DEMOTE else move.source


def _size(copy: _Copy) -> int:
    return len(copy.moves)


def _split(jobs: list[_Job]) -> tuple[list[_Job], list[_Job]]:
    """Those that are under way, and those that are done; one that ends meanwhile is in one list only."""
    under_way: list[_Job] = []
    done: list[_Job] = []
    for job in jobs:
        (done if job.future.done() else under_way).append(job)
    return under_way, done
