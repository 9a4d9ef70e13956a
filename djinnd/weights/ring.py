"""Ring: device memory that streamed blocks pass through, in the order of the model, pass after pass.

    memory │ block 3 │ block 8 │ block 14 │ skipped │      a block begins where the one before it ends; a block that
           ▲ block 19 │ block 24 …                           does not fit before the end begins at the start

Blocks of equal size thus share slots. A block has the same region in every pass, because captured graphs hold its
address. Its copy waits until the last earlier block with an overlapping region has been computed. Copies are queued as
early as that allows: the first blocks of the next pass are copied while this pass ends. Only events on the device keep
the order, and the host never waits.

A pass may be short: it leaves out the parts of blocks that the host computes itself (model/placing/beside_bus.py). The
first copies of a pass are queued before its kind is known, and are those of the last kind. If a pass turns out to need
the parts, they are copied behind everything that is queued; if it does not need them, they are there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from djinnd.device import Device, Event, StreamMark

PIECE = 128 << 20  # bytes of one copy: 16 MiB lose 1 %, 512 gain 0.3 (docs/log)


@dataclass(frozen=True, slots=True)
class RingRegion:
    """Bytes [start, end) of the ring."""

    start: int
    end: int

    def overlaps(self, other: RingRegion) -> bool:
        return self.start < other.end and other.start < self.end


def place_regions(sizes: Sequence[int], capacity: int) -> list[RingRegion]:
    """The region of each block of a pass. A block that does not fit before the end begins at the start. Every size is
    at most `capacity`."""
    regions: list[RingRegion] = []
    at = 0
    for size in sizes:
        assert 0 < size <= capacity, (size, capacity)
        if at + size > capacity:
            at = 0
        regions.append(RingRegion(at, at + size))
        at += size
    return regions


def distances(regions: Sequence[RingRegion]) -> list[int]:
    """For each block, how many turns earlier the last block with an overlapping region came: from 1 to the number of
    blocks."""
    count = len(regions)
    return [
        next(back for back in range(1, count + 1) if regions[turn].overlaps(regions[(turn - back) % count]))
        for turn in range(count)
    ]


_Pieces = list[tuple[Tensor, Tensor]]  # (target, source) of copies


def _between(gaps: Iterable[range], end: int) -> Iterator[range]:
    """The elements up to `end` that are in none of the gaps."""
    start = 0
    for gap in gaps:
        yield range(start, gap.start)
        start = gap.stop
    yield range(start, end)


def _split(target: Tensor, source: Tensor, span: range, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Copies of at most `count` elements each, which bring the span."""
    for start in range(span.start, span.stop, count):
        part = slice(start, min(start + count, span.stop))
        yield target[part], source[part]


class Ring:
    """Copies streamed blocks into their regions, in turns. Turn t belongs to streamed block t mod n.

    A turn is first queued (its copy is under way or done), then taken (its block may compute), then given back. Each
    happens in the order of the turns, so given back <= taken <= queued. The regions of turns that are queued and not
    given back never overlap.
    """

    def __init__(
        self,
        device: Device,
        memory: Tensor,
        regions: Sequence[RingRegion],
        sources: Callable[[int], tuple[Tensor, Tensor]],
        *,
        prefetch: bool = True,
        piece: int = PIECE,
        name: Callable[[int], str] = str,
        left_out: Mapping[int, Sequence[range]] | None = None,
    ) -> None:
        """Queues the first copies.

        memory: uint8 on the device.
        sources: k → (target, source) of the k-th streamed block: a view of its region, and the host tensor to copy
            there; both are flat and of equal length.
        prefetch: False queues a block's copy only when its turn comes, for comparison.
        name: k → name of the block's copies in a trace.
        left_out: k → the elements of the block that short passes leave out, in order.
        """
        self._device = device
        self._regions = list(regions)
        self._distances = distances(regions)
        self._names = [name(k) for k in range(len(regions))]
        self._prefetch = prefetch
        self._pieces: list[_Pieces] = []  # of each block, which every pass needs
        self._others: list[_Pieces] = []  # of each block, which short passes leave out
        for k in range(len(regions)):
            target, source = sources(k)
            count, gaps = max(1, piece // source.element_size()), (left_out or {}).get(k, ())
            for pieces, spans in ((self._pieces, _between(gaps, len(source))), (self._others, gaps)):
                pieces.append([pair for span in spans for pair in _split(target, source, span, count)])
        self._is_short = False
        assert all(region.end <= memory.numel() for region in regions)
        self._start()

    def _start(self) -> None:
        self._queued = self._taken = self._given_back = 0
        self._ready: dict[int, list[Event]] = {}  # turn → an event for each piece, for turns queued and not yet taken
        self._passed: dict[int, StreamMark] = {}  # turn → mark, for turns given back that a later copy may wait for
        self._lacking: set[int] = set()  # queued turns that lack their other pieces, until they are given back
        self._queue_copies()

    @property
    def next(self) -> int:
        """Index of the streamed block that has the next turn."""
        return self._taken % len(self._regions)

    def begin(self, *, short: bool) -> None:
        """Begins a pass. If it is not short, copies what the blocks in the ring lack."""
        self._is_short = short
        if not short:
            for turn in sorted(self._lacking):
                self._copy(turn, self._others, None)  # the lane keeps order: it comes after the turn's other pieces
            self._lacking.clear()

    def take(self) -> bool:
        """Makes work that is queued on the compute stream from now on wait for the next block's copy. Raises the error
        of a failed copy; after that only `restart` may be called. → False if the block lacks what short passes leave
        out."""
        assert self._taken == self._given_back, "the block of the last turn has not been given back"
        if not self._prefetch:
            self._queue(self._device.mark())
        for event in self._ready.pop(self._taken):
            event.order()
        self._taken += 1
        return self._taken - 1 not in self._lacking

    def give_back(self) -> None:
        """Ends the last taken turn, after all work on its block has been queued."""
        assert self._given_back == self._taken - 1
        self._passed[self._given_back] = self._device.mark()
        self._passed.pop(self._given_back - len(self._regions), None)
        self._lacking.discard(self._given_back)
        self._given_back += 1
        self._queue_copies()

    def skip(self, count: int) -> None:
        """Skips `count` turns. Their copies are left out if they are not queued yet. A copy that is queued is wasted;
        the next copy to its region comes after it, because copies run in order."""
        assert self._taken == self._given_back, "the block of the last turn has not been given back"
        if not count:
            return
        mark = self._device.mark()
        for turn in range(self._taken, self._taken + count):
            self._ready.pop(turn, None)
            self._lacking.discard(turn)
            self._passed[turn] = mark
            self._passed.pop(turn - len(self._regions), None)
        self._taken = self._given_back = self._taken + count
        self._queued = max(self._queued, self._taken)
        self._queue_copies()

    def restart(self) -> None:
        """Begins with the first block again, after a pass that was broken off. Waits for the device."""
        self._device.synchronize()
        self._start()

    def _queue_copies(self) -> None:
        if not self._prefetch:
            return
        while True:
            before = self._queued - self._distances[self._queued % len(self._regions)]
            if before >= self._given_back:
                return
            self._queue(self._passed.get(before))

    def _queue(self, after: StreamMark | None) -> None:
        turn = self._queued
        self._ready[turn] = []
        self._copy(turn, self._pieces, after)
        if self._is_short and self._others[turn % len(self._regions)]:
            self._lacking.add(turn)
        else:
            self._copy(turn, self._others, after)
        self._queued += 1

    def _copy(self, turn: int, pieces: Sequence[_Pieces], after: StreamMark | None) -> None:
        k = turn % len(self._regions)
        self._ready[turn] += [self._device.copy(to, of, after, self._names[k]) for to, of in pieces[k]]

    def check_integrity(self) -> None:
        """Asserts that turns are in order and that no region is filled while another turn needs it."""
        assert self._given_back <= self._taken <= self._queued, (self._given_back, self._taken, self._queued)
        assert sorted(self._ready) == list(range(self._taken, self._queued)), sorted(self._ready)
        assert self._lacking <= set(range(self._given_back, self._queued)), sorted(self._lacking)
        live = [self._regions[turn % len(self._regions)] for turn in range(self._given_back, self._queued)]
        for index, region in enumerate(live):
            for other in live[index + 1 :]:
                assert not region.overlaps(other), f"{region} and {other} are in use at once"
