"""A device with two streams, compute and copies, that run when the test says so, in any order that CUDA allows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(eq=False)
class Point:
    """A mark in the compute stream, or the event of a copy."""

    streams: TwoStreams
    passed: bool = False

    def order(self) -> None:
        self.streams.compute.append(self)

    def wait(self) -> None:
        self.streams.synchronize()


@dataclass(eq=False)
class Copy:
    target: Tensor
    source: Tensor
    after: Point | None
    event: Point


@dataclass
class TwoStreams:
    """The part of Device that a ring uses. The compute stream holds work, marks to pass, and events to wait for."""

    compute: deque[Callable[[], None] | Point] = field(default_factory=deque)
    copies: deque[Copy] = field(default_factory=deque)
    marks: set[Point] = field(default_factory=set)

    def copy(self, target: Tensor, source: Tensor, after: Point | None = None, name: str = "copy") -> Point:
        event = Point(self)
        self.copies.append(Copy(target, source, after, event))
        return event

    def mark(self) -> Point:
        mark = Point(self)
        self.marks.add(mark)
        self.compute.append(mark)
        return mark

    def launch(self, work: Callable[[], None]) -> None:
        """Queues work on the compute stream."""
        self.compute.append(work)

    def advance_compute(self) -> bool:
        """Runs the next item of the compute stream. → False if there is none, or it waits for a copy."""
        if not self.compute:
            return False
        head = self.compute[0]
        if not isinstance(head, Point):
            head()
        elif head in self.marks:
            head.passed = True
        elif not head.passed:
            return False
        self.compute.popleft()
        return True

    def advance_copies(self) -> bool:
        """Does the next copy. → False if there is none, or it waits for the compute stream."""
        if not self.copies:
            return False
        copy = self.copies[0]
        if copy.after is not None and not copy.after.passed:
            return False
        copy.target.copy_(copy.source)
        copy.event.passed = True
        self.copies.popleft()
        return True

    def synchronize(self) -> None:
        while self.advance_compute() or self.advance_copies():
            pass
        assert not self.compute and not self.copies, "the streams wait for each other"
