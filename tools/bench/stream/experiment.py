"""What a streaming experiment is: a YAML file, checked. `configs/` has those of the seeds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import yaml
from msgspec import Meta, field

from djinn_client.errors import InvalidRequest

Contender = Literal[
    "gpu-only",
    "accelerate",
    "diffusers",
    "deepspeed",
    "deepspeed-persistent",
    "resident",
    "synchronous",
    "plain",
    "packed",
]
# The order in which they run: djinnd with packing off says how many blocks are resident, and its peers follow.
CONTENDERS: tuple[Contender, ...] = (
    "resident",
    "plain",
    "packed",
    "synchronous",
    "gpu-only",
    "accelerate",
    "diffusers",
    "deepspeed",
    "deepspeed-persistent",
)
SERVED: tuple[Contender, ...] = ("resident", "plain", "packed", "synchronous")

SESSIONS = {1: 512, 4: 512, 16: 128, 32: 64}  # how many decode together → tokens that each of them has before

Positive = Annotated[int, Meta(ge=1)]
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint with random weights, as `tools/make_model.py random` makes it."""

    shape: str
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    reduced: bool = False
    blocks: Annotated[int, Meta(ge=0)] = 0  # 0: the shape's


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    model: Shape | None = None  # None: the checkpoint that the command line names
    weights: Literal["checkpoint", "shared"] = "checkpoint"  # shared: handed over by a client, and on no disk
    device: str = "auto"
    memory: str = "0"  # of the device, for each contender; 0: the daemon's default, and all of it for the others
    settings: dict[str, Any] = {}  # of the model, as in djinnd.yaml; contenders add `packing` and `prefetch`
    resident_memory: str = "0"  # of the daemon that has everything resident
    prompt: Annotated[int, Meta(ge=16)] = 512  # tokens, for the first token, the logits and the peers
    tokens: Annotated[int, Meta(ge=2)] = 17  # that a session generates in a run
    peer_tokens: Positive = 8  # that a peer generates after the first
    sessions: dict[Positive, Positive] = field(default_factory=lambda: dict(SESSIONS))
    runs: Positive = 3
    ttft: bool = True  # measure the first token of the prompt
    peer_limit_s: Positive = 300  # after which a peer is stopped
    contenders: tuple[Contender, ...] = CONTENDERS

    @property
    def memory_bytes(self) -> int:
        return size(self.memory)

    def settings_of(self, contender: Contender) -> dict[str, Any]:
        """A model's settings in the configuration of that contender's daemon."""
        if contender == "resident":  # the same pages and settings, and memory enough
            places = ("resident", "ring_gb", "slots")
            return {name: value for name, value in self.settings.items() if name not in places} | {"packing": "off"}
        variant: dict[Contender, dict[str, Any]] = {
            "plain": {"packing": "off"},
            "packed": {"packing": "auto"},
            "synchronous": {"packing": "off", "prefetch": False},
        }
        return self.settings | variant[contender]


def read(path: Path) -> Experiment:
    """Raises InvalidRequest with what is wrong and where."""
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), Experiment, strict=False)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"{path}: {error}") from error


def size(text: str) -> int:
    """Bytes. Raises InvalidRequest."""
    match = re.fullmatch(r"([0-9.]+) ?(MiB|GiB)|([0-9]+)", text)
    if match is None:
        raise InvalidRequest(f"{text!r} is no size: write it as in 24GiB")
    return int(match[3]) if match[3] else int(float(match[1]) * _UNITS[match[2]])
