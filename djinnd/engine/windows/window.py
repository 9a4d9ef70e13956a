"""Host memory shared with a client, pinned and copied to or from the device in pieces."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

from torch import Tensor

from djinnd.device import CopyLane, Device, Event, StreamMark
from djinnd.engine.io.background import BackgroundWork
from djinnd.engine.tuning import WINDOW_PIECE_BYTES
from djinnd.kvcache.tier import HOST_PAGE


class Window:
    """Pins host memory and copies to or from it. Leaving the context waits for the copies in flight; the memory is then
    unpinned on the thread of BackgroundWork."""

    def __init__(
        self, device: Device, memory: Tensor, page_bytes: int, background: BackgroundWork, *, read_only: bool = False
    ) -> None:
        """memory: uint8 [pages * page_bytes], aligned to a host page."""
        self._device = device
        self._memory = memory
        self._page_bytes = page_bytes
        self._background = background
        self._read_only = read_only
        self._lane = CopyLane.UP if read_only else CopyLane.DOWN
        self._pinned: list[Tensor] = []
        self._flying: deque[Event] = deque()

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First page and number of pages of each piece. A piece starts on a page of the host, because each is pinned by
        itself."""
        pages = len(self._memory) // self._page_bytes
        align = HOST_PAGE // math.gcd(self._page_bytes, HOST_PAGE)
        count = max(WINDOW_PIECE_BYTES // self._page_bytes // align, 1) * align
        return ((first, min(count, pages - first)) for first in range(0, pages, count))

    def pin(self) -> None:
        """Pins all pieces. Raises OutOfMemory."""
        size = self._page_bytes
        pieces = [self._memory[first * size : (first + count) * size] for first, count in self.pieces()]
        self._device.pin(pieces, read_only=self._read_only)
        self._pinned = pieces

    def queue(self, copies: Iterable[tuple[Tensor, Tensor]], after: StreamMark | None = None) -> None:
        """Queues the copies of one piece, as pairs of target and source. Their sources are complete at the mark
        `after`, or at the current end of the compute stream. Blocks while more than two pieces are in flight."""
        after, event = self._device.mark() if after is None else after, None
        for target, source in copies:
            event = self._device.copy(target, source, after, "window", self._lane)
        assert event is not None, "a piece without pages"
        event.order()
        self._flying.append(event)
        if len(self._flying) > 2:
            self._flying.popleft().wait()

    @property
    def is_filled(self) -> bool:
        """True if all queued copies are done."""
        return all(event.has_passed() for event in self._flying)

    def settle(self) -> None:
        """Blocks until the copies in flight are done."""
        while self._flying:
            self._flying.popleft().wait()

    def release(self) -> None:
        """Unpins the memory. Slow."""
        self._device.unpin(self._pinned)
        self._pinned = []

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *error: object) -> None:
        self.settle()
        self._background.later(self.release)  # runs after `pin`, if that is still under way on the same thread


class StagedWindow(Window):
    """A window too small to be pinned: copies from the device go to staging memory, which is pinned already, and reach
    the window in `settle`. Pinning and unpinning a few pages takes the driver longer than that, and a step's calls to
    the driver wait meanwhile."""

    def __init__(self, device: Device, memory: Tensor, page_bytes: int, background: BackgroundWork) -> None:
        super().__init__(device, memory, page_bytes, background)
        self._staged: list[tuple[Tensor, Tensor]] = []  # target, and its bytes in staging memory

    def pin(self) -> None:
        """Touches the pages, so that the engine's thread does not take the page faults."""
        self._memory.zero_()

    def queue(self, copies: Iterable[tuple[Tensor, Tensor]], after: StreamMark | None = None) -> None:
        targets, sources = zip(*copies, strict=True)
        sizes = [len(target) for target in targets]
        staged = self._device.staging(sum(sizes)).split(sizes)
        super().queue(zip(staged, sources, strict=True), after)
        self._staged += zip(targets, staged, strict=True)

    def settle(self) -> None:
        super().settle()
        for target, staged in self._staged:
            target.copy_(staged)
        self._staged.clear()
