"""A session in the engine: its tokens, how many of them have KV, its stage, its edits, and its current request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from djinn_client.protocol import Class
from djinnd.core.drafted import Drafted
from djinnd.core.edits import FOREVER, Edit, cut
from djinnd.core.guesser import Guesser
from djinnd.core.names import Names
from djinnd.core.request import Request
from djinnd.core.stops import LeftStage, Stage


@dataclass(slots=True, eq=False)
class Session:
    """Invariant: 0 <= computed <= len(tokens), and its pages cover at least `computed` tokens, or all tokens if it has
    a stage. The last generated token has no KV until the next step runs it."""

    id: str
    model: str
    tenant: int
    priority: Class
    tokens: list[int] = field(default_factory=list)
    computed: int = 0
    request: Request | None = None
    stage: Stage | None = None  # progress, block by block, of the positions from `computed` on
    left_stage: LeftStage | None = None  # the stage that it gets back with its pages, while these are off the device
    salt: bytes = b""  # makes the keys of its pages its own: see `foreign_tokens`; its forks have the same salt
    adapter: bytes = b""  # identity of its LoRA adapter; its KV is the adapter's, and so are the keys of its pages
    foreign_tokens: int = 0  # the KV of this many first tokens was imported by a client: the tokens do not determine it
    touched: int = 0  # number of the last step that had a row of this session; orders eviction
    given: int = 0  # `touched` when it last got a new token; less than `touched` while its prompt is being read
    waits: bool = False  # its client has sent IO_WAIT: it waits for something else
    wakes_at: float = 0.0  # when it is expected back, in seconds on the engine's clock; 0: unknown
    called: bool = False  # it is about to get a request: its client has said so, or it was expected by now
    quiet_since: float | None = None  # when it was first seen idle since its last request or wake-up
    paused: bool = False  # it gets no row until it is resumed
    row_at: float = 0.0  # when it last had a row or began to wait for one
    passed_over: str = ""  # why it had no row when it was last considered: see why.py
    woken: bool = False  # its pages have left the device since its last row
    left_at: int = 0  # `computed` when its pages last left the device
    edits: tuple[Edit, ...] = ()  # in ascending order of their numbers
    # The next request computes from this position on at the latest: edits changed it, or the last one stopped there.
    due_from: int = FOREVER
    guesser: Guesser | None = None  # guesses its next tokens, once a request that may guess has decoded
    drafted: Drafted | None = None  # its KV and its guesses in its model's draft, if the draft has begun with it

    @property
    def next_position(self) -> int:
        """The position at which its next row begins."""
        return self.computed if self.stage is None else self.stage.done

    @property
    def remaining(self) -> int:
        """Tokens that the model has to run before it can sample the next one, or before all have stopped at a
        breakpoint."""
        return len(self.tokens) - (self.computed if self.stage is None else self.stage.done)

    @property
    def page_salt(self) -> bytes:
        """A part of the keys of its pages, beside tenant, tokens and edits."""
        return self.salt + self.adapter

    @property
    def names(self) -> Sequence[int]:
        """The names of its positions, from which the keys of its pages are made (names.py)."""
        return Names(self.tokens, self.edits) if self.edits else self.tokens

    def together(self, first: int, count: int) -> int:
        """How many of `count` positions from `first` on may go through the model in one step.

        A value that is not finite at one position reaches earlier positions of the same step, because attention
        multiplies it with a weight of 0 (0 times NaN is NaN). The names of those positions would not tell that their KV
        is spoilt. So a step ends before a position that an edit may make infinite or NaN.
        """
        for edit in self.edits:
            if first < edit.wild_from < first + count:
                count = edit.wild_from - first
        return count

    def keeps(self, stage: Stage) -> bool:
        """True if it has this stage, or gets it back with its pages."""
        return self.stage is stage or (self.left_stage is not None and self.left_stage.stage is stage)

    def lose_stage(self) -> None:
        """Drops the stage: positions from `computed` on are run again from the first block."""
        self.stage = self.left_stage = None

    def truncate(self, length: int) -> None:
        assert 0 <= length <= len(self.tokens)
        if length < len(self.tokens):
            self.lose_stage()
        del self.tokens[length:]
        if self.guesser is not None:
            self.guesser.cut(length)
        if self.drafted is not None:
            self.drafted.cut(length)
        self.edits = cut(self.edits, length)
        self.computed = min(self.computed, length)
        self.left_at = min(self.left_at, length)
        self.foreign_tokens = min(self.foreign_tokens, length)
