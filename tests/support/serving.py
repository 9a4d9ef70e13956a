"""Fixtures of daemons with scripted engines, for conftest files to import."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from djinn_client.protocol import OpenSession, SessionOpened
from djinnd.server.checkpoints.names import known_models
from tests.support.scripted_engine.script import Script
from tests.support.served import Served, Wire

TINY = Path(known_models({})["djinn-tiny"].path)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a path short enough for a socket."""
    path = Path(tempfile.mkdtemp(prefix="djinnd-", dir="/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    return Tokenizer.from_file(str(TINY / "tokenizer.json"))


@pytest.fixture
def serve() -> Iterator[Callable[..., Served]]:
    """Starts daemons for one test, with scripted engines."""
    with ExitStack() as stack:

        def start(script: Script | None = None, gated: bool = False, **config: Any) -> Served:
            folder = Path(tempfile.mkdtemp(prefix="djinnd-", dir="/tmp"))
            stack.callback(shutil.rmtree, folder)
            daemon = Served(folder, script, **config)
            return stack.enter_context(daemon.gated() if gated else daemon)

        yield start


@pytest.fixture
def daemon(serve: Callable[..., Served]) -> Served:
    """A daemon with its model loaded. Its engine steps when the test says so."""
    started = serve(gated=True)
    with started.client() as client:
        client.load("djinn-tiny")
    return started


@pytest.fixture
def wire(daemon: Served) -> Iterator[Wire]:
    with Wire(daemon.address) as wire:
        yield wire


@pytest.fixture
def opened(wire: Wire) -> str:
    """The id of a session."""
    reply = wire.ask(OpenSession(id=1, model="djinn-tiny"))
    assert isinstance(reply, SessionOpened), reply
    return reply.session.id


STORY = "def add(a, b):\n    return a + b\n\n\nclass Größe:\n    pass\n\n\n"


@pytest.fixture(scope="module")
def calm(tiny: Tokenizer) -> Iterator[Served]:
    """A daemon shared by tests that leave it as it was. Its engine repeats STORY."""
    folder = Path(tempfile.mkdtemp(prefix="djinnd-", dir="/tmp"))
    try:
        with Served(folder, Script(story=tiny.encode(STORY).ids)) as served:
            with served.client() as client:
                client.load("djinn-tiny")
            yield served
    finally:
        shutil.rmtree(folder)
