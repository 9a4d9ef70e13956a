"""The script that a test gives to a scripted engine, and the sizes of all scripted models."""

from __future__ import annotations

import msgspec

BLOCKS = 8
BLOCK_BYTES = 1 << 13
WEIGHT_BYTES = BLOCKS * BLOCK_BYTES
RING_BYTES = 3 * BLOCK_BYTES
ARENA_BYTES = 1 << 16  # of a model's weights on the host
BUDGET = 1 << 30
WIDTH = 8  # of activations
PAGE_SIZE = 16  # tokens
PAGE_BYTES = 1 << 12
LATE_S = 1.0


class Script(msgspec.Struct):
    """Trouble by its trigger. `on_token`: when the first row of a prompt with this first token runs. `on_load`: when a
    model of this name is loaded. `on_start`: when an engine finds that many marks in `marks`."""

    story: list[int] = msgspec.field(default_factory=lambda: [1, 2, 3])
    context: int = 256
    gate: str = ""
    alive_s: float = 0.05
    on_token: dict[str, str] = {}  # token: die, hang, garbage, fail
    on_load: dict[str, str] = {}  # model: die, fail, full, big, late (after LATE_S)
    pages: int = 0  # bytes of the host tier of each model, unless its Load names them
    on_shutdown: str = ""  # hang; linger: finishes its work and does not exit
    keep_host: bool = True  # False: gives back a model's arena after its load
    on_start: dict[str, str] = {}  # nth start: die, refuse, hang
    marks: str = ""  # a file that gets one byte for each start
