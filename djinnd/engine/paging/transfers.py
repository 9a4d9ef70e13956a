"""Carries out the page moves that Paging decides on, between pool, host and disk, while steps run.

    demote    pool ──lane DOWN──► host slot ─ landed ─ checksum (a thread) ─ sealed
    promote   host slot ─(checksum, if another process has filled it)──lane UP──► pool ─ landed
    write out host slot ──PageFile──► file ─ landed, sealed
    fetch     file ──PageFile, checked──► host slot ─ landed, sealed; then it is promoted

page_copies.py does the copies over the bus.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from torch import Tensor

from djinnd.device import Device, StreamMark
from djinnd.engine.memory.host_pages import HostPages
from djinnd.engine.paging.checksums import Checksums
from djinnd.engine.paging.page_copies import PageCopies
from djinnd.engine.tuning import POLL_S
from djinnd.kvcache.moves import Direction, Move, Transfer
from djinnd.kvcache.page_file import BadPage, PageFile
from djinnd.kvcache.paging import Paging
from djinnd.kvcache.tenancy import Tenancy
from djinnd.kvcache.tier import Tier

log = logging.getLogger("djinnd.engine")

_CHANGED = "its bytes on {} have another checksum than when they were written"


class Transfers:
    """The page moves of one model, used by the engine's thread. Owns the host's pages and the disk's file once they are
    attached."""

    def __init__(self, device: Device, paging: Paging, pool: Callable[[], Tensor], half_bytes: int) -> None:
        """`pool` and `half_bytes`: see PageCopies."""
        self.host: HostPages | None = None
        self.disk: PageFile | None = None
        self.disk_rate = 0.0  # bytes a second, as last measured
        self.weights_stream = False
        self._device = device
        self._paging = paging
        self._pool = pool
        self._half_bytes = half_bytes
        self._copies: PageCopies | None = None  # between the device and the host's pages
        self._checksums = Checksums()  # of pages to be promoted, and of pages that have been demoted
        self._filing: dict[Move, Future[int]] = {}  # reads and writes of the file; results are checksums
        self._fetching_since, self._fetched = 0.0, 0  # start of the current run of file reads, and bytes read since
        self._mark: StreamMark | None = None  # from the last turn, if copies may begin
        self._asked = 0  # moves that had been asked for at the last turn, and have not begun
        self._failed_at = 0.0  # time of the last logged failure of a file

    def attach_host(self, pages: HostPages, tenancy: Tenancy | None = None) -> None:
        """`tenancy`: see Tier."""
        self.host = pages
        self._copies = PageCopies(self._device, self._paging.moves, pages, self._pool, self._half_bytes)
        self._paging.use_host(Tier(pages.table, pages.capacity, tenancy, pages.page_bytes, are_ready=False))
        self.note_ready()

    def note_ready(self) -> None:
        """Called in each turn: tells Paging about host pages that have been pinned since. Sessions that wait for pages
        do not wait for pinning. It makes 0.9 GB/s of pages ready, while a 13B model on an H200 computes 16 GB/s of KV.
        """
        if self.host is not None and self._paging.host is not None:
            for slots in self.host.take_ready():
                self._paging.host.make_ready(slots)

    def attach_disk(self, file: PageFile, tenancy: Tenancy | None = None) -> None:
        self.disk = file
        self._paging.use_disk(Tier(file.table, file.slots, tenancy, file.page_bytes))

    # --- a turn of the engine's loop --------------------------------------------------------------------------------

    def turn(self) -> list[Transfer]:
        """Ends finished moves and notes new ones; does not block. → the transfers that have ended."""
        over = self.end()
        self.note_asked()
        return over

    def note_asked(self) -> None:
        """All moves asked for by now may begin in the next `begin_copies`."""
        self._asked = self._paging.moves.waiting
        if self._asked or (self._copies is not None and self._copies.has_queued):
            self._mark = self._device.mark()

    def end(self) -> list[Transfer]:
        """Does the bookkeeping of copies and jobs that have ended; does not block, and may be called while a step runs.
        → the transfers that have ended."""
        over: list[Transfer] = []
        if self._paging.is_busy:
            self._end_copies(over)
            self._end_jobs(over)
        return over

    def begin_copies(self, rate: float = math.inf) -> None:
        """Queues the moves noted by the last `note_asked`, as far as the limits of copies in flight allow. They run
        after the work that the device had then, and beside the work that it has got since: no request gets a page that
        is moving. `rate`: bytes a second each way for moves that no call waits for."""
        mark, self._mark = self._mark, None
        asked, self._asked = self._asked, 0
        moves = self._paging.moves.take(asked)
        copies = self._copies
        if copies is None:
            assert not moves, "there are no moves without the host"
            return
        first = copies.piece_pages
        # The first piece does not wait for the bookkeeping of all moves.
        for some in (moves[:first], moves[first:]) if len(moves) > first else (moves,):
            for move in some:
                self._begin(move)
            if mark is not None:
                copies.begin(mark, rate, weights_stream=self.weights_stream)

    def follow(self) -> list[Transfer]:
        """Called when the device is idle. Orders the compute stream after the next copies of a transfer, if these end
        in about the time that launching a step takes, or their first halves do. So the step can be launched before the
        copies end. → the transfers that have ended as far as work queued from now on is concerned."""
        followed = [] if self._copies is None else self._copies.follow()
        return [transfer for move in followed for transfer in self._paging.moves.followed(move)]

    def wait(self) -> None:
        """Blocks until another turn may find work. Called when the device is idle."""
        copying = None if self._copies is None else self._copies.next
        if copying is not None:
            with suppress(Exception):  # `turn` reports it
                copying.wait()
        else:
            time.sleep(POLL_S)

    def settle(self) -> list[Transfer]:
        """Ends all moves. → the transfers that have ended."""
        over = self.turn()
        while self._paging.is_busy:
            self.begin_copies()
            self.wait()
            over += self.turn()
        return over

    def _begin(self, move: Move) -> None:
        if move.direction in (Direction.WRITE_OUT, Direction.FETCH):
            self._file(move)
        elif move.checksum is not None:
            self._sum(move.source, move)
        else:
            self._copy(move)

    def _copy(self, move: Move) -> None:
        assert self._copies is not None
        self._copies.add(move)

    def _end_copies(self, over: list[Transfer]) -> None:
        for moves, wrong in [] if self._copies is None else self._copies.end():
            for move in moves:
                if wrong:
                    is_bad = move.direction is Direction.PROMOTE
                    over += self._fail_move(move, f"{move.direction.value}: {wrong}", bad=is_bad)
                    continue
                over += self._paging.moves.landed(move)
                if move.direction is Direction.DEMOTE:
                    self._sum(move.target, move)

    # --- in threads -------------------------------------------------------------------------------------------------

    def _sum(self, slot: int, move: Move) -> None:
        assert self.host is not None
        self._checksums.ask(self.host.slot(slot).numpy(), move)

    def _file(self, move: Move) -> None:
        assert self.host is not None and self.disk is not None
        if not self._filing:
            self._fetching_since, self._fetched = time.monotonic(), 0
        if move.direction is Direction.WRITE_OUT:
            self._filing[move] = self.disk.write(move.target, self.host.extent(move.source))
        else:
            assert move.checksum is not None
            self._filing[move] = self.disk.read(move.source, self.host.extent(move.target), move.checksum)

    def _end_jobs(self, over: list[Transfer]) -> None:
        for move, summed in self._checksums.take():
            if move.direction is Direction.DEMOTE:
                over += self._paging.moves.sealed(move, summed)
            elif summed == move.checksum:
                self._copy(move)
            else:
                over += self._fail_move(move, _CHANGED.format("the host"), bad=True)
        for move in [move for move, future in self._filing.items() if future.done()]:
            over += self._end_filing(move, self._filing.pop(move))

    def _end_filing(self, move: Move, future: Future[int]) -> list[Transfer]:
        assert self.disk is not None
        try:
            summed = future.result()
        except BadPage:
            return self._fail_move(move, _CHANGED.format("disk"), bad=True)
        except OSError as error:
            return self._fail_move(move, f"{move.direction.value}: {error}", bad=move.direction is Direction.FETCH)
        if summed != move.checksum:
            return self._fail_move(move, _CHANGED.format("the host"), bad=True)
        if move.direction is Direction.FETCH:
            self._fetched += self.disk.page_bytes
            self.disk_rate = self._fetched / (time.monotonic() - self._fetching_since)
        return self._paging.moves.landed(move) + self._paging.moves.sealed(move, summed)

    def _fail_move(self, move: Move, why: str, *, bad: bool) -> list[Transfer]:
        """A move has failed, and its tier has lost a page, which is recomputed when it is needed. `bad`: the page
        cannot be read, or its bytes are wrong. It is dropped from the tier, or it would be asked for again and again.
        """
        now = time.monotonic()
        if bad or now - self._failed_at > 60:
            log.warning("page_lost reason=%r", why)
            self._failed_at = now
        return self._paging.moves.failed(move, bad=bad)

    def close(self) -> None:
        """Frees host pages and file. No move is under way."""
        assert not self._paging.is_busy
        self._checksums.close()
        self._paging.close()
        if self.disk is not None:
            self.disk.close()
        if self.host is not None:
            self.host.release()
