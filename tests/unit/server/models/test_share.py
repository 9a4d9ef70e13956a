"""A shared model on the daemon's side, and the users that may use it."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from djinn_client.errors import InvalidRequest, ModelNotFound
from djinn_client.protocol.fields.placing import Placing
from djinnd.config import Limits
from djinnd.server.arenas.arena import Arena
from djinnd.server.checkpoints.inspection import Inspector
from djinnd.server.engines.fork_server import ForkServer
from djinnd.server.journal.journal import Journal
from djinnd.server.loading.models import ModelTable
from djinnd.server.models.share import Share, sweep
from djinnd.server.quotas.quotas import QuotaTable
from djinnd.server.sessions.prefixes import PrefixTable
from djinnd.server.sessions.sessions import SessionTable
from djinnd.server.text.texts import Texts
from tests.support.descriptors import open_descriptors

OWNER = SimpleNamespace(user=1000, is_admin=False)
OTHER = SimpleNamespace(user=1001, is_admin=False)
ADMIN = SimpleNamespace(user=1002, is_admin=True)


def share(folder, number="0123", **changes):
    fields = {"id": number, "model": "mine", "user": 1000, "public": False, "clients": set(), "folder": folder / number}
    return Share(**fields, stored="float32", dtype="auto", kv_bytes=0, placing=Placing(packing=False), **changes)


def files(content):
    fd = os.memfd_create("files")
    os.write(fd, content)
    return fd


def test_files_are_kept_until_the_share_is_released(tmp_path):
    parent = tmp_path / "shared"
    before = open_descriptors()
    made = share(parent)
    made.write_files(files(b"{}[]"), {"config.json": 2, "tokenizer.json": 2})
    assert (made.folder / "config.json").read_bytes() == b"{}"
    assert (made.folder / "tokenizer.json").read_bytes() == b"[]"
    assert made.folder.stat().st_mode & 0o777 == parent.stat().st_mode & 0o777 == 0o700
    made.release()
    assert (list(parent.iterdir()), open_descriptors()) == ([], before)
    made.release()


def test_folders_of_dead_daemons_are_swept_and_no_others(tmp_path):
    (tmp_path / "left").mkdir()
    (tmp_path / "left" / "config.json").write_text("{}")
    made = share(tmp_path)
    made.write_files(files(b"{}"), {"config.json": 2})
    before = open_descriptors()
    sweep(tmp_path)
    assert (list(tmp_path.iterdir()), open_descriptors()) == ([made.folder], before)
    made.release()
    sweep(tmp_path / "nowhere")


def test_a_folder_that_cannot_be_created_costs_no_descriptor(tmp_path):
    before = open_descriptors()
    made = share(tmp_path)
    with pytest.raises(InvalidRequest, match="ends after 2 of 3 bytes"):
        made.write_files(files(b"{}"), {"config.json": 3})
    made.release()
    assert open_descriptors() == before


def models_with(made, tmp_path):
    journal = Journal("")
    sessions, prefixes = (
        SessionTable(Limits(), QuotaTable({}, lambda user: ()), lambda session: None, journal),
        PrefixTable(Limits(), journal),
    )
    arena = Arena(str(tmp_path))
    engine = lambda: pytest.fail("no engine is needed")  # noqa: E731
    models = ModelTable(
        {},
        sessions,
        arena,
        engine,
        engine,
        tmp_path,
        prefixes,
        Limits(),
        Texts(Limits()),
        Inspector([], ForkServer([], {}, []), Limits(), lambda user, seconds: None, lambda user: None),
        True,
        "",
        lambda user: user == ADMIN.user,
        lambda user: pytest.fail("nothing is charged"),
    )
    models.add_shared(made)
    return models


def test_a_model_is_visible_to_its_owner_unless_it_is_public(tmp_path):
    made = share(tmp_path)
    models = models_with(made, tmp_path)
    names = {client.user: [model.name for model in models.visible(client)] for client in (OWNER, OTHER, ADMIN)}
    assert names == {1000: ["djinn-tiny", "mine"], 1001: ["djinn-tiny"], 1002: ["djinn-tiny", "mine"]}
    assert models.find_open("mine", OWNER) is models.find_open("mine", ADMIN)
    with pytest.raises(ModelNotFound) as hidden:
        models.find_open("mine", OTHER)
    with pytest.raises(ModelNotFound) as unknown:
        models.find_open("none", OTHER)
    assert hidden.value.message.replace("mine", "none") == unknown.value.message
    made.public = True
    assert models.find_open("mine", OTHER).share is made
    assert [models.find("mine").is_of(client) for client in (OWNER, OTHER, ADMIN)] == [True, False, True]


def test_no_client_opens_a_withdrawn_model(tmp_path):
    made = share(tmp_path)
    models = models_with(made, tmp_path)
    made.ended = True
    for client in (OWNER, ADMIN):
        assert models.find("mine", client).share is made
        with pytest.raises(ModelNotFound, match="withdrawn it"):
            models.find_open("mine", client)
