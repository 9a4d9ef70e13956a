"""A streaming experiment: a YAML file, checked. Examples are in `tools/bench/configs`."""

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
# Contenders in the order of their runs. djinnd with packing off tells how many blocks are resident, so it runs before
# its peers.
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

SESSIONS = {1: 512, 4: 512, 16: 128, 32: 64}  # sessions that decode together → tokens that each of them has before

Positive = Annotated[int, Meta(ge=1)]
_UNITS = {"MiB": 1 << 20, "GiB": 1 << 30}


class Shape(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A checkpoint with random weights, as `tools/make_model.py random` makes it."""

    shape: str
    dtype: Literal["bf16", "fp16", "fp32"] = "bf16"
    reduced: bool = False
    blocks: Annotated[int, Meta(ge=0)] = 0  # 0: the shape's
    form: Literal["", "fp8", "mxfp4"] = ""  # codes of a quantised checkpoint, instead of dtype


class Experiment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    name: str
    model: Shape | None = None  # None: the checkpoint of the command line
    weights: Literal["checkpoint", "shared"] = "checkpoint"  # shared: a client hands the weights over
    device: str = "auto"
    memory: str = "0"  # device memory of each contender; 0: the daemon's default, and everything for its peers
    settings: dict[str, Any] = {}  # of the model, as in djinnd.yaml; contenders add `packing` and `prefetch`
    resident_memory: str = "0"  # of the daemon with everything resident
    prompt: Annotated[int, Meta(ge=16)] = 512  # tokens, for the first token, the logits and the peers
    tokens: Annotated[int, Meta(ge=2)] = 17  # tokens that a session generates in a run
    peer_tokens: Positive = 8  # tokens that a peer generates after the first
    sessions: dict[Positive, Positive] = field(default_factory=lambda: dict(SESSIONS))
    runs: Positive = 3
    ttft: bool = True  # measure the first token of the prompt
    peer_limit_s: Positive = 300  # a peer is stopped after this time
    contenders: tuple[Contender, ...] = CONTENDERS

    @property
    def memory_bytes(self) -> int:
        return size(self.memory)

    def settings_of(self, contender: Contender) -> dict[str, Any]:
        """The model's settings in the configuration of the contender's daemon."""
        if contender == "resident":  # the same pages and settings, with enough memory
            places = ("resident", "ring_gb", "slots")
            return {name: value for name, value in self.settings.items() if name not in places} | {"packing": "off"}
        variant: dict[Contender, dict[str, Any]] = {
            "plain": {"packing": "off"},
            "packed": {"packing": "auto"},
            "synchronous": {"packing": "off", "prefetch": False},
        }
        return self.settings | variant[contender]


def read(path: Path) -> Experiment:
    """Reads an experiment. Raises InvalidRequest that names the fault and its place."""
    try:
        return msgspec.convert(yaml.safe_load(path.read_text()), Experiment, strict=False)
    except (yaml.YAMLError, msgspec.ValidationError) as error:
        raise InvalidRequest(f"{path}: {error}") from error


def size(text: str) -> int:
    """Reads a size in bytes. Raises InvalidRequest."""
    match = re.fullmatch(r"([0-9.]+) ?(MiB|GiB)|([0-9]+)", text)
    if match is None:
        raise InvalidRequest(f"{text!r} is no size: write it as in 24GiB")
    return int(match[3]) if match[3] else int(float(match[1]) * _UNITS[match[2]])
