"""The daemon, which runs as root here, lends no user its rights: a model that a user cannot read does not exist for
that user, and models of one user change nothing for others."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import djinn_client as djinn
from djinn_client import errors
from djinn_client.files.model_files import ModelFiles
from djinn_client.protocol import Failure, FilesHandedOver, HandOverFiles, LoadModel, ModelReply, Progress, encode
from djinn_client.transport.exchange import close_all
from tests.support.other_user import as_user, only_root, open_to_all
from tests.support.parameters import long_except
from tests.support.served import Served, Wire, wait_for
from tests.support.serving import TINY

ALICE, BOB = 23001, 23002
pytestmark = only_root


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    daemon = serve(models={"ours": {"path": str(TINY)}}, limits={"model_files_per_user": 8})
    open_to_all(daemon.folder, daemon.address)
    return daemon


def checkpoint(folder: Path, user: int, mode: int = 0o700) -> str:
    """A checkpoint folder of this user."""
    folder.mkdir(parents=True)
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TINY / name, folder)
    for path in (folder, *folder.iterdir()):
        os.chown(path, user, user)
        path.chmod(mode)
    return str(folder)


def names(daemon: Served) -> list[str]:
    return [model.name for model in djinn.models(address=daemon.address)]


def load(daemon: Served, folder: str, **sizes: Any) -> str:
    return djinn.load(folder, address=daemon.address, **sizes).name


@contextmanager
def wire_of(user: int, daemon: Served) -> Iterator[Wire]:
    with as_user(user):
        wire = Wire(daemon.address)
    with wire:
        yield wire


def hand_over(wire: Wire, folder: str, names: list[str], fds: list[int]) -> Any:
    """Hands over open files, and closes the descriptors."""
    frame = encode(HandOverFiles(id=7, folder=folder, names=names), len(fds))
    try:
        sent = socket.send_fds(wire.socket, [frame], fds)
        wire.socket.sendall(frame[sent:])
    finally:
        close_all(fds)
    return wire.reply()


def loaded(wire: Wire, model: str) -> Any:
    wire.send(LoadModel(id=8, model=model))
    while isinstance(reply := wire.reply(), Progress):
        pass
    return reply


@pytest.mark.smoke
def test_a_private_model_does_not_exist_for_others(served: Served) -> None:
    secret = checkpoint(served.folder / "alice" / "merger", ALICE)
    with as_user(ALICE):
        assert load(served, secret) == secret
    with as_user(BOB):
        assert names(served) == ["djinn-tiny", "ours"]
        for call in (djinn.Session, djinn.plan, djinn.load, djinn.unload):
            with pytest.raises(errors.ModelNotFound) as hidden:
                call(secret, address=served.address)
            with pytest.raises(errors.ModelNotFound) as missing:
                call(str(served.folder / "alice" / "nothing"), address=served.address)
            assert hidden.value.message == missing.value.message
    with wire_of(BOB, served) as wire:
        hidden_, missing_ = (wire.ask(LoadModel(id=3, model=name)) for name in (secret, "/nothing"))
        assert isinstance(hidden_, Failure) and isinstance(missing_, Failure)
        assert (hidden_.code, hidden_.message.replace(secret, "/nothing")) == ("files_wanted", missing_.message)
    with as_user(ALICE), djinn.Session(secret, address=served.address) as s:
        assert s.generate("def f(", max_tokens=2).token_ids
    assert secret in names(served), "administrators see all models"


def test_a_name_taken_by_another_user_leads_to_one_s_own_files(served: Served) -> None:
    hers = checkpoint(served.folder / "alice", ALICE)
    his = checkpoint(served.folder / "bob", BOB)
    with wire_of(BOB, served) as wire, as_user(BOB):
        with ModelFiles.open(his) as files:
            reply = hand_over(wire, hers, list(files), [os.dup(files.descriptor(name)) for name in files])
        assert isinstance(reply, FilesHandedOver) and reply.model == hers
        assert isinstance(loaded(wire, hers), ModelReply)
    with as_user(ALICE), djinn.Session(hers, address=served.address) as s:
        assert s.info.model.startswith(f"{hers}@")
        assert names(served) == ["djinn-tiny", "ours", s.info.model]
    with as_user(BOB):
        assert names(served) == ["djinn-tiny", "ours", hers]


NO_PROOFS: dict[str, Callable[[str], int]] = {
    "a place": lambda path: os.open(path, os.O_PATH),
    "for writing": lambda path: os.open(path, os.O_WRONLY),
    "for ioctl": lambda path: os.open(path, 3),
    "a folder": lambda path: os.open(os.path.dirname(path), os.O_RDONLY),
    "a pipe": lambda path: os.pipe2(os.O_NONBLOCK)[0],
    "a socket": lambda path: socket.socket(socket.AF_UNIX).detach(),
    "a device": lambda path: os.open("/dev/zero", os.O_RDONLY),
}


@pytest.mark.smoke
@pytest.mark.parametrize("kind", long_except(("for writing",), NO_PROOFS))
def test_a_descriptor_that_does_not_prove_a_right_to_read_gives_none(served: Served, kind: str) -> None:
    secret = checkpoint(served.folder / "alice", ALICE)
    with as_user(ALICE):
        load(served, secret)
    with wire_of(BOB, served) as wire:
        fds = [NO_PROOFS[kind](f"{secret}/{name}") for name in ("config.json", "tokenizer.json")]
        reply = hand_over(wire, secret, ["config.json", "tokenizer.json"], fds)
        assert isinstance(reply, Failure) and reply.code == "invalid_request", reply
    with as_user(BOB):
        assert names(served) == ["djinn-tiny", "ours"]


@pytest.mark.parametrize("names_", [[], ["config.json"], ["a/b", "c"], ["config.json"] * 2, ["..", "config.json"]])
def test_names_that_do_not_fit_the_descriptors(served: Served, names_: list[str]) -> None:
    with wire_of(BOB, served) as wire:
        fds = [os.open(TINY / name, os.O_RDONLY) for name in ("config.json", "tokenizer.json")]
        reply = hand_over(wire, "/there", names_, fds)
        assert isinstance(reply, Failure) and reply.code == "invalid_request", reply
        assert isinstance(loaded(wire, "djinn-tiny"), ModelReply)


def test_a_checkpoint_is_one_model_for_all_users_that_can_read_it(served: Served) -> None:
    public = checkpoint(served.folder / "public", ALICE, 0o755)
    links = served.folder / "links"
    links.mkdir()
    (links / "link").symlink_to(public)
    (links / "copy").mkdir()
    for name in os.listdir(public):
        os.link(f"{public}/{name}", links / "copy" / name)
    spelled = [public + "/", public.replace("/public", "//./public"), str(links / "link"), str(links / "copy")]
    with as_user(ALICE):
        assert {load(served, name) for name in [public, *spelled]} == {public}
    with as_user(BOB):
        assert {load(served, name) for name in spelled} == {public}
        assert names(served) == ["djinn-tiny", "ours", public]
        with pytest.raises(errors.NotPermitted, match="its owner or an administrator"):
            djinn.unload(public, address=served.address)
        told = djinn.load(public, kv_bytes=1 << 30, keep_alive_s=5, address=served.address)
        assert any("kv_bytes, keep_alive_s: ignored" in note for note in told.notes)
        assert load(served, str(TINY)) in ("djinn-tiny", "ours"), "it has a name in the configuration"


def test_only_administrators_change_how_a_configured_model_is_loaded(served: Served) -> None:
    with as_user(BOB):
        told = djinn.load("ours", kv_bytes=1, host_kv_bytes=0, disk_kv_bytes=0, resident=0, address=served.address)
        assert any("kv_bytes, placing: ignored" in note for note in told.notes), told.notes
        with pytest.raises(errors.NotPermitted, match="only administrators"):
            djinn.unload("ours", address=served.address)
    with pytest.raises(errors.InvalidRequest, match="to give it other KV memory"):
        djinn.load("ours", kv_bytes=1, address=served.address)


def test_open_files_count_until_they_are_closed(served: Served) -> None:
    folders = [checkpoint(served.folder / f"bob{number}", BOB) for number in range(5)]
    with as_user(BOB):
        for folder in folders[:4]:
            load(served, folder)
        with pytest.raises(errors.QuotaExceeded, match="8 open files of models"):
            load(served, folders[4])
        djinn.unload(folders[0], address=served.address)
        wait_for(lambda: not _is_refused(served, folders[4]))
    hers = checkpoint(served.folder / "alice", ALICE)
    with as_user(ALICE):
        load(served, hers)


def _is_refused(served: Served, folder: str) -> bool:
    with suppress(errors.QuotaExceeded):
        load(served, folder)
        return False
    return True


def test_after_a_restart_the_same_files_are_opened_again_and_no_others(served: Served) -> None:
    folder = checkpoint(served.folder / "alice", ALICE)
    with as_user(ALICE), djinn.Session(folder, address=served.address) as s:
        tokens = s.generate("def f(", max_tokens=2).token_ids
        s.detach()
    served.start_again(kill=True)
    os.chmod(served.address, 0o666)
    with as_user(ALICE), djinn.Session.attach(s.id, address=served.address) as again:
        assert again.generate(max_tokens=1).token_ids, "the files are the same"
        again.detach()
    served.start_again(kill=False)
    os.chmod(served.address, 0o666)
    os.utime(f"{folder}/config.json")  # changes its ctime
    with as_user(ALICE), djinn.Session.attach(s.id, address=served.address) as again:
        with pytest.raises(errors.ModelNotFound, match=f"djinnctl load {folder}"):
            again.generate(max_tokens=1)
        assert load(served, folder) == folder
        assert again.generate(max_tokens=1).token_ids and again.token_ids()[-4:-2] == tokens
