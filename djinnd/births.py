"""What server and nursery say to each other. Each packet of their socket pair (SOCK_SEQPACKET) is one message.

    server ──Bear, with the engine's socket──► nursery ──Born, with the engine's pidfd──► server, later Ended
                                                  └────Refused──► server

The nursery outlives a restart of the server, and so it may be of another release, or have libraries that have been
upgraded since: it refuses then, and is replaced.
"""

from __future__ import annotations

import sys
from importlib import metadata

import msgspec

from djinnd import __version__

MAX_PACKET = 1 << 20  # bytes; the environment is the largest part of one

_DISTRIBUTIONS = ("torch", "transformers", "triton", "numpy", "safetensors", "tokenizers", "msgspec")


class Bear(msgspec.Struct, tag="bear"):
    """An engine is wanted: a process that runs `python -m` with `arguments`, after which it finds `--fd` with the
    number of the socket that comes with this message, and `--parent` with the nursery's pid."""

    arguments: list[str]
    environ: dict[str, str]
    versions: dict[str, str]


class Born(msgspec.Struct, tag="born"):
    pid: int  # also of its process group


class Ended(msgspec.Struct, tag="ended"):
    pid: int
    status: int  # the exit status; negative: the signal that killed it


class Refused(msgspec.Struct, tag="refused"):
    """Instead of `Born`; it would refuse again."""

    reason: str


FromNursery = Born | Ended | Refused

encode = msgspec.msgpack.Encoder().encode
decode_to_nursery = msgspec.msgpack.Decoder(Bear).decode
decode_from_nursery = msgspec.msgpack.Decoder(FromNursery).decode


def versions() -> dict[str, str]:
    """Of what a process would have that started now, without importing it."""
    found = {"python": sys.version, "djinnd": __version__}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # triton: only with CUDA builds of torch
            continue
    return found
