"""Messages between the server and the nursery, the process that starts engines. A packet of their socket pair
(SOCK_SEQPACKET) is one message.

    server ──Bear, with the engine's socket──► nursery ──Born, with the engine's pidfd──► server, later Ended
                                                  └────Refused──► server

The nursery outlives a restart of the server. If djinnd or a library has been upgraded since it started, it refuses to
start an engine, and the server replaces it.
"""

from __future__ import annotations

import sys
from importlib import metadata

import msgspec

from djinnd import __version__

MAX_PACKET = 1 << 20  # bytes; the environment is the largest part of a packet

_DISTRIBUTIONS = ("torch", "transformers", "triton", "numpy", "safetensors", "tokenizers", "msgspec")


class Bear(msgspec.Struct, tag="bear"):
    """Asks for an engine process. It runs `python -m` with `arguments`, followed by `--fd` and the number of the socket
    that comes with this message, and `--parent` and the nursery's pid."""

    arguments: list[str]
    environ: dict[str, str]
    versions: dict[str, str]  # of the server: see `versions`


class Born(msgspec.Struct, tag="born"):
    """The engine has been started. Its pidfd comes with this message."""

    pid: int  # also the id of its process group


class Ended(msgspec.Struct, tag="ended"):
    """The engine has ended."""

    pid: int
    status: int  # exit status; if negative, the number of the signal that killed it


class Refused(msgspec.Struct, tag="refused"):
    """The nursery does not start the engine, and would refuse again. Replaces `Born`."""

    reason: str


FromNursery = Born | Ended | Refused

encode = msgspec.msgpack.Encoder().encode
decode_to_nursery = msgspec.msgpack.Decoder(Bear).decode
decode_from_nursery = msgspec.msgpack.Decoder(FromNursery).decode


def versions() -> dict[str, str]:
    """Versions of Python, djinnd and its libraries that a process would get if it started now. Imports none of them."""
    found = {"python": sys.version, "djinnd": __version__}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # triton: only with CUDA builds of torch
            continue
    return found
