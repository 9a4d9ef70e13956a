"""Results of contenders and of the whole experiment, and the messages to and from a peer's process."""

from __future__ import annotations

import statistics
from enum import StrEnum

import msgspec

from tools.bench.stream.memory import Phase


class Status(StrEnum):
    MEASURED = "measured"
    OUT_OF_MEMORY = "out of memory"
    SKIPPED = "skipped"  # a package or a device is missing
    FAILED = "failed"


class Job(msgspec.Struct, kw_only=True, frozen=True):
    """The job of a peer: transformers' model, and one session."""

    checkpoint: str
    device: str  # "cuda:0", or "cpu"
    dtype: str  # torch's name
    memory: int  # device memory in bytes that torch may allocate; 0: all
    resident: int  # blocks that stay on the device, if the peer has a setting for them
    prompt: list[int]
    tokens: int  # tokens that a run generates after the first
    runs: int
    logits: str  # file that receives the prompt's logits: .npy, float32 [tokens, vocab]
    outcome: str  # file that receives the Outcome, as JSON


class Found(msgspec.Struct, kw_only=True):
    """Seconds, one figure for each run."""

    first_token_s: list[float]
    step_s: dict[int, list[float]]  # by sessions
    streamed_bytes: int  # bytes of one forward pass over the bus
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
    """Comparison of a prompt's logits."""

    max_difference: float | None = None  # from transformers' logits
    argmax_share: float | None = None  # share of positions with transformers' likeliest token
    last_argmax: bool | None = None  # the same at the position that generates
    as_resident: bool | None = None  # bit for bit equal to djinnd with all weights resident


class Outcome(msgspec.Struct, kw_only=True):
    """The result of one contender."""

    status: Status
    note: str = ""  # the reason of a failure, or a remark
    found: Found | None = None
    equality: Equality | None = None
    peak_bytes: int | None = None  # of device memory


class Results(msgspec.Struct, kw_only=True):
    """The results of an experiment as far as it has come."""

    device: str
    bus: dict[int, float]  # bytes a second to the device, by MiB of a piece
    memory_rate: float  # bytes a second that a copy within the device reads and writes
    contenders: dict[str, Outcome] = {}  # by name
    pieces: dict[int, Outcome] = {}  # `plain` by MiB of a copy
    phases: list[Phase] = []  # contenders' turns, with begin and end in seconds
    device_memory: list[tuple[float, int]] = []  # seconds, bytes

    @property
    def ceiling(self) -> float:
        """The bus's best rate of all piece sizes, in bytes a second."""
        return max(self.bus.values())
