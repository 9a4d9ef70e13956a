"""The places of a model's blocks, as a caller asks for them and as the daemon plans them.

A *plain* block is in device memory in the dtype of computing. A *packed* block is there in the lossless 12-bit code or
in the code of its checkpoint, and is decoded just before it computes. A *streamed* block is in host memory, and passes
through a slot of the ring in every step."""

from __future__ import annotations

from typing import Literal

import msgspec

from djinn_client.errors import InvalidRequest
from djinn_client.protocol.fields.bounds import Whole

Quantise = Literal["", "fp8", "int8"]
KvForm = Literal["", "fp8"]
Part = Literal["", "heads"]

MAX_BYTES = (1 << 63) - 1
MAX_BLOCKS = 1 << 16
MAX_SLOTS = 1 << 10
LEAST_PIECE = 64 << 10  # bytes; smaller ones are all overhead


class Placing(msgspec.Struct, frozen=True, omit_defaults=True):
    resident: Whole | float | None = None  # blocks (an int) or a share of them (a float, 0 to 1); None: as many as fit
    ring_bytes: Whole = 0  # of device memory for the ring; 0: by slots
    slots: Whole = 0  # of the ring, each for the largest streamed block; 0: the engine decides
    packing: bool = True  # bfloat16 blocks may be packed where they do not all fit plain
    quantise: Quantise = ""  # fp8, int8: plain matrices of blocks are quantised when they are loaded; "": never
    kv_dtype: KvForm = ""  # fp8: keys and values are kept as e4m3; "": in the dtype of computing
    speculation: bool = False  # steps also run guesses of next tokens, which changes no token
    draft: str = ""  # a model of the daemon's configuration that guesses, too; only with speculation
    # heads: of the checkpoint only the head that predicts several tokens; only the daemon's configuration sets this
    part: Part = ""
    cpu_beside_bus: bool = False  # the host computes MLPs of streamed blocks; only the daemon's configuration sets this
    adapter_bytes: Whole = 0  # of device memory set aside for LoRA adapters; only the daemon's configuration sets this
    keep_host: bool = True  # False: the host's copy goes once every block is resident
    prefetch: bool = True  # False: each copy waits for its block's turn; only the daemon's configuration sets this
    piece_bytes: Whole = 0  # of one copy over the bus, likewise; 0: the engine decides

    def validate(self) -> None:
        """Raises InvalidRequest for a value outside its range; NaN is outside every range."""
        if isinstance(self.resident, float):
            if not 0.0 <= self.resident <= 1.0:
                raise InvalidRequest(
                    f"resident is {self.resident}; a share of the blocks must be from 0.0 to 1.0", field="resident"
                )
        elif self.resident is not None:
            _expect("resident", self.resident, MAX_BLOCKS)
        _expect("ring_bytes", self.ring_bytes, MAX_BYTES)
        _expect("adapter_bytes", self.adapter_bytes, MAX_BYTES)
        _expect("slots", self.slots, MAX_SLOTS)
        _expect("piece_bytes", self.piece_bytes, MAX_BYTES)
        if self.draft and not self.speculation:
            told = f"the draft {self.draft} is given without speculation: set both, or leave the draft out"
            raise InvalidRequest(told, field="draft")
        if self.ring_bytes and self.slots:
            raise InvalidRequest("the ring is given in bytes and in slots: give one of them", field="slots")
        if 0 < self.piece_bytes < LEAST_PIECE:
            raise InvalidRequest(
                f"piece_bytes is {self.piece_bytes:,}; it must be 0 (the engine decides) or at least {LEAST_PIECE:,}",
                field="piece_bytes",
            )


class ModelPlan(msgspec.Struct, kw_only=True):
    """The memory that a model would take and its speed, predicted from the device's measured rates."""

    model: str
    family: str
    dtype: str
    budget_bytes: int  # of device memory that the plan is for
    blocks: int
    blocks_plain: int
    blocks_packed: int
    blocks_streamed: int
    plain_block_bytes: int  # of the largest block
    packed_block_bytes: int  # of the largest block; 0 where none can be packed
    weight_bytes: int  # as in the checkpoint
    resident_bytes: int  # of the resident blocks, plain and packed
    streamed_bytes: int  # over the bus in one pass
    ring_bytes: int
    scratch_bytes: int  # where packed blocks are decoded
    rest_bytes: int  # of weights beside the blocks: embedding, norms, head
    kv_bytes: int
    page_bytes: int = 0  # of KV
    page_tokens: int = 0
    workspace_bytes: int
    adapter_bytes: int = 0  # set aside for LoRA adapters
    reserved_bytes: int  # for the device's context and libraries
    others_bytes: int = 0  # of other models that are loaded now; 0 in a plan for a number of bytes
    host_bytes: int  # of shared memory
    slots: int
    bus_bytes_per_s: float  # measured, host to device
    memory_bytes_per_s: float  # measured, of the device: a copy's, read plus written
    reading_bytes_per_s: float = 0.0  # measured: of weights that a product with one row reads
    flops_per_s: float  # measured, in the model's dtype
    launch_s: float = 0.0  # measured: of a small kernel in a chain
    first_token_s: float  # of a prompt of first_token_tokens, from a quiet daemon
    first_token_tokens: int = 512
    step_s: dict[int, float] = {}  # of decoding, by the number of sessions
    codes: list[str] = []  # in which the checkpoint's weights are kept, such as fp8 or Q4_K
    quantised: Quantise = ""  # see Placing.quantise
    kv_dtype: KvForm = ""  # see Placing.kv_dtype
    notes: list[str] = []  # why blocks stay plain, and such


def ring_bytes(gigabytes: float) -> int:
    """Bytes of `ring_gb`, which people write in 10^9 bytes. Raises InvalidRequest."""
    if type(gigabytes) not in (int, float) or not 0.0 <= gigabytes <= MAX_BYTES / 1e9:
        raise InvalidRequest(f"ring_gb is {gigabytes}; it must be 0 (by slots) or a number of 10^9 bytes")
    return round(gigabytes * 1e9)


def _expect(name: str, value: int, most: int) -> None:
    if not 0 <= value <= most:
        raise InvalidRequest(f"{name} is {value:,}; it must be from 0 to {most:,}", field=name)
