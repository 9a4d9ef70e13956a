"""A session as the engine knows it: tokens, how many of them have KV, what is on its way, and the request that runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from djinn_client.protocol import Class
from djinnd.core.edits import FOREVER, Edit, cut
from djinnd.core.names import Names
from djinnd.core.request import Request
from djinnd.core.stops import LeftStage, Stage


@dataclass(slots=True, eq=False)
class Session:
    """Invariant: 0 <= computed <= len(tokens); pages cover at least `computed` tokens. The last generated token has
    no KV until the next step runs it. With a stage, pages cover all tokens."""

    id: str
    model: str
    tenant: int
    klass: Class
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    request: Request | None = None
    stage: Stage | None = None  # of the positions from `computed` on
    left_stage: LeftStage | None = None  # while its pages are elsewhere
    salt: bytes = b""  # sets the keys of its pages apart: see `foreign_tokens`; its forks have it, too
    foreign_tokens: int = 0  # of the first ones, whose KV a client gave: it does not follow from them
    touched: int = 0  # number of the last step that had a row of this session; orders eviction
    given: int = 0  # what `touched` was when it was last given a token: less while it is being read
    waits: bool = False  # its client has said that it waits for something else
    wakes_at: float = 0.0  # when that is expected to be over; 0: nobody knows
    called: bool = False  # it will ask for something in a moment, as its client says, or is expected to
    quiet_since: float | None = None  # when it was first seen to be idle since its last request, or since it was called
    paused: bool = False  # it gets no row
    bulk: bool = False  # the time between its tokens matters no more than anybody's
    row_at: float = 0.0  # when it last had a row, or was lined up
    passed_over: str = ""  # why it has no row in the last step, of those that were asked
    woken: bool = False  # its pages have left the device since its last row
    left_at: int = 0  # what `computed` was when its pages last left the device
    edits: tuple[Edit, ...] = ()  # in the order of their numbers
    due_from: int = (
        FOREVER  # the next request begins here at the latest: edits have changed it, or the last one stopped
    )

    @property
    def next_position(self) -> int:
        """At which its next row begins."""
        return self.computed if self.stage is None else self.stage.done

    @property
    def remaining(self) -> int:
        """Tokens that the model has still to run before it can give the next one, or before they have stopped."""
        return len(self.tokens) - (self.computed if self.stage is None else self.stage.done)

    @property
    def names(self) -> Sequence[int]:
        """What the KV of each position follows from, beside that of those before it: by these, pages are known."""
        return Names(self.tokens, self.edits) if self.edits else self.tokens

    def together(self, first: int, count: int) -> int:
        """Of so many positions from `first` on, how many may go through the model in one step. What is no number at one
        of them would come to those before it that attend beside it (a weight of 0 times NaN is NaN), and their KV is
        known by names that say nothing of it."""
        for edit in self.edits:
            if first < edit.wild_from < first + count:
                count = edit.wild_from - first
        return count

    def keeps(self, stage: Stage) -> bool:
        """It has the stage, or has it again when its pages are back."""
        return self.stage is stage or (self.left_stage is not None and self.left_stage.stage is stage)

    def lose_stage(self) -> None:
        """What is on its way through the blocks is run anew."""
        self.stage = self.left_stage = None

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        if length < len(self.tokens):
            self.lose_stage()
        del self.tokens[length:]
        self.edits = cut(self.edits, length)
        self.computed = min(self.computed, length)
        self.left_at = min(self.left_at, length)
        self.foreign_tokens = min(self.foreign_tokens, length)
