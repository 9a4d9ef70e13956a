"""Models that a caller names by their folder: each client opens it, where the daemon asks for that."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest

import djinn_client as djinn
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import Done, FilesHandedOver, HandOverFiles, Ping
from djinn_client.transport.connection import Connection, connect
from djinn_client.transport.steps import run
from tests.support.daemon import Daemon

from .conftest import MODEL, Api


@pytest.fixture(scope="session")
def daemon_address(daemon: Daemon) -> str:
    """Files pass between processes of one machine only."""
    return daemon.address


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, daemon_address: str) -> Iterator[Path]:
    """A copy of the shipped checkpoint, and so another model."""
    path = tmp_path_factory.mktemp("models") / "tiny"
    shutil.copytree(str(files("djinnd") / "models" / MODEL), path)
    djinn.load(str(path), kv_bytes=4 << 20, host_kv_bytes=0, disk_kv_bytes=0, address=daemon_address)
    yield path
    djinn.unload(str(path), address=daemon_address)


@pytest.fixture
def connection(daemon_address: str) -> Iterator[Connection]:
    made = run(connect(daemon_address))
    yield made
    made.close()


async def test_every_spelling_of_a_folder_is_one_model(api: Api, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent.parent)
    link = folder.parent / f"link-{os.urandom(4).hex()}"
    link.symlink_to(folder)
    for name in (f"{folder}/", f"/{folder}", f"./{folder.parent.name}/tiny", f"{folder.parent.name}/tiny", str(link)):
        async with api.session(model=name) as s:
            assert s.info.model == str(folder)


async def test_a_folder_that_is_not_there(api: Api, folder: Path) -> None:
    for name in (f"{folder}-not", "./not/there", "~/not/there"):
        with pytest.raises(djinn.ModelNotFound):
            async with api.session(model=name):
                pass


def test_files_that_are_handed_over_are_known_again(connection: Connection, folder: Path) -> None:
    with ModelFiles.open(str(folder)) as opened:
        fds = [opened.descriptor(name) for name in opened]
        for called in ("/another/name", str(folder)):
            request = HandOverFiles(id=0, folder=called, names=list(opened))
            assert run(connection.call(request, FilesHandedOver, fds=fds)).message.model == str(folder)


@pytest.mark.parametrize("count", [0, 1, 240])
def test_descriptors_without_names_are_refused_and_the_connection_goes_on(connection: Connection, count: int) -> None:
    fd = os.open("/", os.O_RDONLY)
    try:
        with pytest.raises(djinn.DjinnError):
            run(connection.call(HandOverFiles(id=0, folder="/there", names=[]), FilesHandedOver, fds=[fd] * count))
        run(connection.call(Ping(id=0), Done))
    finally:
        os.close(fd)
