"""A session of the scripted engine, and figures that follow from it."""

from __future__ import annotations

from dataclasses import dataclass, field

from djinnd import messages
from djinnd.core.edits import FOREVER, Edit
from djinnd.core.stops import Stop
from tests.support.scripted_engine.script import PAGE_SIZE


@dataclass
class Session:
    model: str
    tenant: int
    tokens: list[int] = field(default_factory=list)
    run: messages.Run | None = None
    first: int = 0
    prompt_end: int = 0
    held: bool = False
    paused: str = ""  # the tier
    waits: bool = False
    wait_of: str = ""  # the tool, and the expected seconds
    priority: str = ""  # class set while it was open
    is_started: bool = False
    edits: tuple[Edit, ...] = ()
    due_from: int = FOREVER
    seen_from: int = 0  # first position that the run captures
    computed: int = 0
    stage: int = 0  # block before which the last run stopped
    stops: tuple[Stop, ...] = ()  # of the run

    @property
    def runs(self) -> bool:
        """True if a step would run it."""
        return bool(self.run and not self.held and not self.paused)

    @property
    def pages(self) -> int:
        return -(-len(self.tokens) // PAGE_SIZE)

    @property
    def generated(self) -> int:
        """Tokens of the run."""
        return len(self.tokens) - self.prompt_end

    def shift(self, position: int) -> int:
        """The sum of the numbers of the edits at this position."""
        extents = ((edit.number, extent) for edit in self.edits for extent in edit.extents)
        return sum(number for number, extent in extents if extent.start <= position < extent.end)

    def use(self, name: str) -> messages.SessionUse:
        """A paused or waiting session has all its pages on the host."""
        state = "paused" if self.paused else "running" if self.run else "waiting" if self.waits else "idle"
        if self.paused or self.waits:
            return messages.SessionUse(name, state, 0, 0, host_pages=self.pages)
        return messages.SessionUse(name, state, len(self.tokens), self.pages)
