"""A private daemon for the time of a measurement."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

import djinn_client as djinn
from tools.bench.harness.command import say
from tools.private_daemon import DaemonFailed, PrivateDaemon


@contextmanager
def private_daemon(config: Mapping[str, Any], folder: Path | None = None) -> Iterator[str]:
    """Starts a daemon with this configuration and gives its address. Where it fails, the end of its log is shown.

    Its socket and its state are in a new folder below `folder`, or below the system's folder for temporary files.
    """
    with tempfile.TemporaryDirectory(prefix="djinnd-bench-", dir=folder) as own:
        daemon = PrivateDaemon(Path(own), yaml.safe_dump(dict(config)))
        try:
            with daemon:
                daemon.wait_until_ready()
                yield daemon.address
        except (djinn.DjinnError, DaemonFailed):
            say(daemon.last_words())
            raise


def device_name(address: str) -> str:
    return djinn.status(address=address).devices[0].description
