"""`python -m djinnd.gateway`: the HTTP gateway as a process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
from functools import partial
from pathlib import Path

import click
import msgspec
import uvloop

from djinnd import descriptors
from djinnd.config import Config, ConfigError, Effective, Key, load
from djinnd.gateway.http.listening import ListenError
from djinnd.gateway.server import GatewayServer
from djinnd.lifeline import tie_to
from djinnd.standard_streams import open_standard_streams
from djinnd.telemetry import configure_logging


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(path_type=Path), envvar="DJINND_CONFIG", help="Instead of the system's file.")
@click.option("--socket", metavar="PATH", help="Where the daemon is.")
@click.option("--listen", metavar="ADDRESS", help="HOST:PORT, or the path of a Unix socket, instead of the file's.")
@click.option("--parent", type=int, default=0, help="The daemon that has started this, and with which it ends.")
def main(config: Path | None, socket: str | None, listen: str | None, parent: int) -> None:
    """Serves HTTP and sessions of other machines: sections `http` and `remote` of the daemon's configuration."""
    open_standard_streams()
    if parent:
        tie_to(parent, signal.SIGTERM)
    read = partial(_read, config, socket, listen)
    try:
        settings = read()
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    descriptors.allow_many()
    configure_logging(settings.log.level, settings.log.format)
    logging.getLogger("uvicorn").setLevel("CRITICAL")  # the gateway writes its own log lines
    try:
        server = GatewayServer(settings, read)
    except ListenError as error:
        raise click.ClickException(str(error)) from error
    gc.collect()
    gc.freeze()  # a full collection stops every stream, and need not look through modules, which stay
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve())


def _read(config: Path | None, socket: str | None, listen: str | None) -> Config:
    """Raises ConfigError."""
    effective = load(config, os.environ.copy(), {("socket",): socket})
    return with_address(effective, listen) if listen else effective.config


def with_address(effective: Effective, address: str) -> Config:
    """The configuration of a gateway that was started by hand. It listens at this address only, and its own machine
    needs no tokens unless the configuration says otherwise."""
    key: Key = ("http", "loopback_without_token")
    http = effective.config.http
    is_path = "/" in address
    changed = msgspec.structs.replace(
        http,
        listen="" if is_path else address,
        socket=address if is_path else "",
        loopback_without_token=http.loopback_without_token if key in effective.origins else True,
    )
    return msgspec.structs.replace(effective.config, http=changed)


if __name__ == "__main__":
    main(prog_name="djinnd-gateway")
