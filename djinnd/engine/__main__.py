"""`python -m djinnd.engine`: the server, which holds the other end of the socket pair, has it forked or starts it."""

from __future__ import annotations

import logging
import signal

import click

from djinn_client.errors import DjinnError
from djinnd.engine.lifeline import tie_to
from djinnd.telemetry import configure_logging

# (tokens, rows) of one step: a chunk that keeps the device busy without keeping others waiting for long.
_LIMITS = {"cpu": (512, 256), "cuda": (2048, 256)}


@click.command()
@click.option("--fd", type=int, required=True, help="Connected stream socket to the server.")
@click.option("--parent", type=int, default=0, help="Its pid: the engine ends when it does.")
@click.option("--device", default="auto")
@click.option("--memory", type=int, default=0, help="Budget in bytes; 0: the device's default.")
@click.option("--kernel-seconds", type=float, default=120.0, help="That compiling one kernel may take.")
@click.option("--grammar-seconds", type=float, default=10.0, help="That one answer of a grammar process may take.")
@click.option("--grammar-memory", type=int, default=1 << 30, help="Bytes of a grammar process.")
@click.option("--log-level", default="info")
@click.option("--log-format", default="text")
def main(
    fd: int,
    parent: int,
    device: str,
    memory: int,
    kernel_seconds: float,
    grammar_seconds: float,
    grammar_memory: int,
    log_level: str,
    log_format: str,
) -> None:
    if parent:
        tie_to(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C is for the server, which then says Shutdown
    configure_logging(log_level, log_format)
    from djinnd.device import open_device  # torch takes seconds to import: after the signals are in order
    from djinnd.engine.channel import Channel
    from djinnd.engine.engine import Engine
    from djinnd.engine.kernel_compiler import kernel_compiler_for

    log = logging.getLogger("djinnd.engine")
    channel = Channel(fd)
    try:
        opened = open_device(device, memory)
    except DjinnError as error:
        log.error("device_refused device=%s error=%s", device, error.message)
        raise SystemExit(3) from error
    try:
        compiler = kernel_compiler_for(opened.torch_device, kernel_seconds)
        limits = _LIMITS[opened.torch_device.type]
        Engine(channel, opened, *limits, compiler, (grammar_seconds, grammar_memory)).serve()
    finally:
        opened.close()
        channel.close()


if __name__ == "__main__":
    main()
