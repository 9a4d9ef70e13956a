from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

import pytest

from tests.support.scripted_daemon import ScriptedDaemon


@pytest.fixture
def directory() -> Iterator[str]:
    """A folder with a path short enough for a socket."""
    path = tempfile.mkdtemp(prefix="djinn-")
    yield path
    shutil.rmtree(path)


@pytest.fixture
def daemon(directory: str) -> Iterator[ScriptedDaemon]:
    scripted = ScriptedDaemon(os.path.join(directory, "s"))
    yield scripted
    scripted.stop()
