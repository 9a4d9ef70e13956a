"""`djinnd`, also `python -m djinnd`."""

from __future__ import annotations

import asyncio
import logging
import os
from functools import partial
from pathlib import Path

import click
import uvloop

from djinnd import __version__, descriptors
from djinnd.config import ConfigError, Key, load, show
from djinnd.standard_streams import open_standard_streams
from djinnd.telemetry import FORMATS, LEVELS, configure_logging

log = logging.getLogger("djinnd.server")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--config", type=click.Path(path_type=Path), envvar="DJINND_CONFIG", help="Configuration file.")
@click.option("--device", metavar="auto|cpu|cuda[:N]", help="Device that models run on.")
@click.option("--memory", metavar="SIZE", help="Hard budget of device memory, as in 20GiB.")
@click.option("--socket", metavar="PATH", help="Unix socket for clients.")
@click.option("--state-dir", metavar="PATH", help="Folder for data that outlives the daemon.")
@click.option("--log-level", type=click.Choice(LEVELS))
@click.option("--log-format", type=click.Choice(FORMATS))
@click.option("--http", metavar="ADDRESS", help="Also serve HTTP: HOST:PORT, as in 127.0.0.1:8000, or a socket's path.")
@click.option("--check-config", is_flag=True, help="Print the effective configuration and its origins; exit.")
@click.version_option(__version__)
def main(
    config: Path | None,
    http: str | None,
    check_config: bool,
    log_level: str | None,
    log_format: str | None,
    **flags: str,
) -> None:
    """The daemon: serves sessions of the models on this machine's device.

    Settings come from /etc/djinnd/djinnd.yaml or --config, then from DJINND_* variables, then from these flags.
    """
    open_standard_streams()
    given: dict[Key, str | None] = {(key,): text for key, text in flags.items()}
    given |= {("log", "level"): log_level, ("log", "format"): log_format}
    read = partial(load, config, os.environ.copy(), given)
    try:
        effective = read()
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    if check_config:
        for name in effective.unknown:
            click.echo(f"{name} is set, but djinnd has no such setting", err=True)
        click.echo(show(effective))
        return
    configure_logging(effective.config.log.level, effective.config.log.format)
    for name in effective.unknown:
        log.warning("variable_unknown name=%s", name)
    descriptors.allow_many()

    from djinnd.server.handover.socket_path import StartError
    from djinnd.server.handover.succession import succeed
    from djinnd.server.server import run  # a slow import, which --check-config does without

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            handed_over = runner.run(run(effective.config, lambda: read().config, http, config))
    except StartError as error:
        raise click.ClickException(str(error)) from error
    if handed_over:
        log.info("djinnd_succeeded pid=%d", os.getpid())
        succeed(handed_over)


if __name__ == "__main__":
    main(prog_name="djinnd")
