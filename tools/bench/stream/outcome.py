"""What is found, of each contender and of all; and what travels to and from a peer's process."""

from __future__ import annotations

import statistics
from enum import StrEnum

import msgspec

from tools.bench.stream.memory import Phase


class Status(StrEnum):
    MEASURED = "measured"
    OUT_OF_MEMORY = "out of memory"
    SKIPPED = "skipped"  # it cannot run here: a package or a device is missing
    FAILED = "failed"


class Job(msgspec.Struct, kw_only=True, frozen=True):
    """For a peer: transformers' model, one session."""

    checkpoint: str
    device: str  # "cuda:0", or "cpu"
    dtype: str  # torch's name
    memory: int  # bytes that torch may allocate on the device; 0: all
    resident: int  # blocks that stay on the device, where the peer can be told
    prompt: list[int]
    tokens: int  # that a run generates after the first
    runs: int
    logits: str  # file that receives those of the prompt: .npy, float32 [tokens, vocab]
    outcome: str  # file that receives the Outcome, as JSON


class Found(msgspec.Struct, kw_only=True):
    """Seconds, one figure a run."""

    first_token_s: list[float]
    step_s: dict[int, list[float]]  # by sessions
    streamed_bytes: int  # that a pass brings over the bus
    resident_blocks: int | None = None
    packed_blocks: int | None = None
    streamed_blocks: int | None = None

    @property
    def first_token(self) -> float | None:
        return statistics.median(self.first_token_s) if self.first_token_s else None

    def step(self, sessions: int) -> float:
        return statistics.median(self.step_s[sessions])

    def bandwidth(self, sessions: int) -> float:
        """Bytes a second over the bus in decode."""
        return self.streamed_bytes / self.step(sessions)


class Equality(msgspec.Struct, kw_only=True):
    """Of a prompt's logits."""

    max_difference: float | None = None  # from transformers'
    argmax_share: float | None = None  # of the positions, where the likeliest token is transformers'
    last_argmax: bool | None = None  # of the position that generates
    as_resident: bool | None = None  # bit for bit those of djinnd with all weights resident


class Outcome(msgspec.Struct, kw_only=True):
    """Of one contender."""

    status: Status
    note: str = ""  # why not, or what else there is to say
    found: Found | None = None
    equality: Equality | None = None
    peak_bytes: int | None = None  # of the device's memory


class Results(msgspec.Struct, kw_only=True):
    """Of an experiment, as far as it has come."""

    device: str
    bus: dict[int, float]  # bytes a second to the device, by MiB of a piece
    memory_rate: float  # bytes a second that a copy within the device reads and writes
    contenders: dict[str, Outcome] = {}  # by name
    pieces: dict[int, Outcome] = {}  # `plain` by MiB of a copy
    phases: list[Phase] = []  # whose turn it was, from when to when, in seconds
    device_memory: list[tuple[float, int]] = []  # seconds, bytes

    @property
    def ceiling(self) -> float:
        """Of the bus, bytes a second: the best that a piece size reaches."""
        return max(self.bus.values())
