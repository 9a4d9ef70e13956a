"""The commands by which the server starts its other processes."""

from __future__ import annotations

import os
from pathlib import Path

from djinnd.config import Config
from djinnd.server.handover.python import python_module


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
