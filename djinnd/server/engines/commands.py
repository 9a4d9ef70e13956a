"""The commands by which the server starts its other processes."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from djinnd.config import Config


def python_module(name: str, *options: str) -> list[str]:
    """The command that runs `name`, an installed module.

    With `-m` alone, Python imports from the working directory first: a file there with the name of a library would run
    with the daemon's rights. `-P` leaves the working directory out.
    """
    return [sys.executable, "-P", "-m", name, *options]


def engine_command(config: Config) -> list[str]:
    limits = config.limits
    bounds = ["--kernel-seconds", str(limits.kernel_compile)]
    bounds += ["--grammar-seconds", str(limits.text_seconds), "--grammar-memory", str(limits.text_memory)]
    return python_module("djinnd.engine", "--device", config.device, *bounds, *_log_options(config))


def gateway_command(config: Config, http: str, file: Path | None) -> list[str]:
    options = ["--socket", config.socket, "--listen", http, "--parent", str(os.getpid())]
    return python_module("djinnd.gateway", *options, *(["--config", str(file)] if file else []))


def fork_server_command(config: Config) -> list[str]:
    return python_module("djinnd.engine.fork_server", *_log_options(config))


def inspect_command() -> list[str]:
    return python_module("djinnd.engine.load.inspection")


def _log_options(config: Config) -> list[str]:
    return ["--log-level", config.log.level, "--log-format", config.log.format]
