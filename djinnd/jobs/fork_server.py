"""Messages between the server and the fork server, the process that starts engines. A packet of their socket pair
(SOCK_SEQPACKET) is one message.

    server ──ForkProcess, with the engine's socket──► fork server ──ProcessForked, with its pidfd──► server
                                                               ──ProcessEnded, later──────────► server
                                                               ──ForkRefused, instead─────────► server

The fork server outlives a restart of the server. If djinnd or a library has been upgraded since it started, it refuses
to start an engine, and the server replaces it.
"""

from __future__ import annotations

import sys
from importlib import metadata

import msgspec

from djinnd import __version__

MAX_PACKET = 1 << 20  # bytes; the environment is the largest part of a packet

_DISTRIBUTIONS = ("torch", "transformers", "triton", "numpy", "safetensors", "tokenizers", "msgspec")


class ForkProcess(msgspec.Struct, tag="fork"):
    """Asks for an engine process. It runs `python -m` with `arguments`, followed by `--fd` and the number of the socket
    that comes with this message, and `--parent` and the fork server's pid."""

    arguments: list[str]
    environ: dict[str, str]
    versions: dict[str, str]  # of the server: see `versions`


class ProcessForked(msgspec.Struct, tag="forked"):
    """The engine has been started. Its pidfd comes with this message."""

    pid: int  # also the id of its process group


class ProcessEnded(msgspec.Struct, tag="ended"):
    """The engine has ended."""

    pid: int
    status: int  # exit status; if negative, the number of the signal that killed it


class ForkRefused(msgspec.Struct, tag="refused"):
    """The fork server does not start the engine, and would refuse again. Replaces `ProcessForked`."""

    reason: str


FromForkServer = ProcessForked | ProcessEnded | ForkRefused

encode = msgspec.msgpack.Encoder().encode
decode_to_fork_server = msgspec.msgpack.Decoder(ForkProcess).decode
decode_from_fork_server = msgspec.msgpack.Decoder(FromForkServer).decode


def versions() -> dict[str, str]:
    """Versions of Python, djinnd and its libraries that a process would get if it started now. Imports none of them."""
    found = {"python": sys.version, "djinnd": __version__}
    for name in _DISTRIBUTIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:  # triton: only with CUDA builds of torch
            continue
    return found
