"""Host memory that passes between the device and a client: pinned in pieces, and copied a piece at a time."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator

from torch import Tensor

from djinnd.device import Device, Event, Lane, Mark
from djinnd.engine.courses import Courses

PIECE_BYTES = 32 << 20
STAGED_BYTES = 512 << 10
HOST_PAGE = 4096


class Window:
    """Host memory while it is pinned and copied from or to. Leaving the context waits for the copies in flight, and has
    the memory unpinned in the thread of courses."""

    def __init__(
        self, device: Device, memory: Tensor, page_bytes: int, courses: Courses, *, read_only: bool = False
    ) -> None:
        """memory: uint8 [pages * page_bytes], from the beginning of a host page."""
        self._device = device
        self._memory = memory
        self._page_bytes = page_bytes
        self._courses = courses
        self._read_only = read_only
        self._lane = Lane.UP if read_only else Lane.DOWN
        self._pinned: list[Tensor] = []
        self._flying: deque[Event] = deque()

    def pieces(self) -> Iterator[tuple[int, int]]:
        """First page and count. A piece starts on a page of the host, too: so each is pinned by itself."""
        pages = len(self._memory) // self._page_bytes
        align = HOST_PAGE // math.gcd(self._page_bytes, HOST_PAGE)
        count = max(PIECE_BYTES // self._page_bytes // align, 1) * align
        return ((first, min(count, pages - first)) for first in range(0, pages, count))

    def pin(self) -> None:
        """Raises OutOfMemory."""
        size = self._page_bytes
        pieces = [self._memory[first * size : (first + count) * size] for first, count in self.pieces()]
        self._device.pin(pieces, read_only=self._read_only)
        self._pinned = pieces

    def queue(self, copies: Iterable[tuple[Tensor, Tensor]], after: Mark | None = None) -> None:
        """One piece, target and source of each copy; what they read has been there since `after`, or is now."""
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
        """Whether all copies that were queued have happened."""
        return all(event.has_passed() for event in self._flying)

    def settle(self) -> None:
        """Waits for the copies in flight."""
        while self._flying:
            self._flying.popleft().wait()

    def release(self) -> None:
        """Unpins the memory. Takes long."""
        self._device.unpin(self._pinned)
        self._pinned = []

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *error: object) -> None:
        self.settle()
        self._courses.later(self.release)  # behind `pin`, where that is still under way


class StagedWindow(Window):
    """One that is too small to be pinned: copies from the device go by way of memory that is pinned already, and reach
    the window when they have been settled. To pin a few pages, and to unpin them, takes the driver longer than that,
    and whatever a step asks of it meanwhile waits."""

    def __init__(self, device: Device, memory: Tensor, page_bytes: int, courses: Courses) -> None:
        super().__init__(device, memory, page_bytes, courses)
        self._staged: list[tuple[Tensor, Tensor]] = []  # target, and where its bytes come first

    def pin(self) -> None:
        """Has the pages come, so that the engine's thread need not wait for them."""
        self._memory.zero_()

    def queue(self, copies: Iterable[tuple[Tensor, Tensor]], after: Mark | None = None) -> None:
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
