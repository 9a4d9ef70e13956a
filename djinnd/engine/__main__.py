"""`python -m djinnd.engine`: the engine process. The server has the fork server fork it, or starts it, and holds the
other end of the socket pair."""

from __future__ import annotations

import logging
import signal

import click

from djinn_client.errors import DjinnError
from djinnd.engine.tuning import STEP_LIMITS
from djinnd.lifeline import tie_to
from djinnd.telemetry import configure_logging


@click.command()
@click.option("--fd", type=int, required=True, help="Connected stream socket to the server.")
@click.option("--parent", type=int, default=0, help="The server's pid: the engine exits when the server does.")
@click.option("--device", default="auto")
@click.option("--memory", type=int, default=0, help="Budget in bytes; 0: the device's default.")
@click.option("--kernel-seconds", type=float, default=120.0, help="Time limit for compiling one kernel.")
@click.option("--grammar-seconds", type=float, default=10.0, help="Time limit for one answer of a grammar process.")
@click.option("--grammar-memory", type=int, default=1 << 30, help="Memory limit of a grammar process, in bytes.")
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
    # a terminal's Ctrl-C goes to the server too, which then sends Shutdown
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_logging(log_level, log_format)
    from djinnd.device import open_device  # importing torch takes seconds, and the signal must be ignored before
    from djinnd.engine.engine import Engine
    from djinnd.engine.io.channel import ServerChannel
    from djinnd.engine.kernels.compiler import kernel_compiler_for

    log = logging.getLogger("djinnd.engine")
    channel = ServerChannel(fd)
    try:
        opened = open_device(device, memory)
    except DjinnError as error:
        log.error("device_refused device=%s error=%s", device, error.message)
        raise SystemExit(3) from error
    try:
        compiler = kernel_compiler_for(opened.torch_device, kernel_seconds)
        limits = STEP_LIMITS[opened.torch_device.type]
        Engine(channel, opened, *limits, compiler, (grammar_seconds, grammar_memory)).serve()
    finally:
        opened.close()
        channel.close()


if __name__ == "__main__":
    main()
