"""Loading and unloading: one load for all waiting requests, progress for each, and failures that leave nothing."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest

import djinn_client as djinn
from djinn_client import errors
from djinn_client.protocol import (
    Cancel,
    Done,
    Generate,
    Generated,
    ListModels,
    LoadModel,
    ModelReply,
    OpenSession,
    PlanModel,
    Progress,
    UnloadModel,
)
from djinn_client.protocol.fields.placing import Placing
from tests.support.scripted_engine.script import Script
from tests.support.served import Wire, wait_for
from tests.support.serving import TINY


@pytest.fixture
def checkpoint(folder):
    """A checkpoint folder without a tokenizer. Its path is the model's name."""
    path = folder / "checkpoint"
    path.mkdir()
    shutil.copy(TINY / "config.json", path)
    return path


def collect(wire):
    """Collects progress until the final reply, which is the last element."""
    told = [wire.reply()]
    while isinstance(told[-1], Progress):
        told.append(wire.reply())
    return told


def test_all_requests_for_a_model_share_its_load_and_see_its_progress(serve):
    daemon = serve()
    wires = [Wire(daemon.address) for _ in range(3)]
    for wire in wires:
        wire.send(OpenSession(id=1, model="djinn-tiny"))
    told = [collect(wire) for wire in wires]
    for wire in wires:
        wire.socket.close()
    assert len({replies[-1].session.id for replies in told}) == 3
    for replies in told:
        assert {(p.model, p.done, p.total) for p in replies[:-1]} <= {("djinn-tiny", 10, 100), ("djinn-tiny", 100, 100)}
        assert replies[:-1], "this client got no progress"
    assert daemon.log.count("model_ready") == 1


def test_opening_a_session_loads_the_model_and_unloading_gives_its_memory_back(serve):
    daemon = serve()
    with djinn.Session("djinn-tiny", address=daemon.address), daemon.client() as client:
        assert len(daemon.arena()) == 1
        with pytest.raises(errors.InvalidRequest, match="1 sessions use djinn-tiny"):
            client.unload("djinn-tiny")
    with daemon.client() as client:
        client.unload("djinn-tiny")
        assert daemon.arena() == []
        assert [(m.name, m.state) for m in client.models()] == [("djinn-tiny", "available")]
        client.unload("djinn-tiny")
        client.load("djinn-tiny")
        assert client.status(check=True).integrity == []


def notes(client):
    return client.status().models[0].notes


def test_a_model_s_pages_are_created_and_removed_with_it(serve):
    daemon = serve(Script(pages=1 << 16))
    with daemon.client() as client:
        client.load("djinn-tiny")
        folder = daemon.folder / "state" / "pages"
        wait_for(lambda: notes(client) == [f"pages: new, 65536 bytes, disk: {folder}"])
        assert folder.stat().st_mode & 0o777 == 0o700
        assert len(daemon.arena()) == 2
        assert client.status(check=True).integrity == []
        client.unload("djinn-tiny")
        assert daemon.arena() == []
        client.load("djinn-tiny", host_kv_bytes=0, disk_kv_bytes=0)
        assert len(daemon.arena()) == 1
        for other in ({"host_kv_bytes": 1}, {"disk_kv_bytes": 1}):
            with pytest.raises(errors.InvalidRequest, match="to give it other KV memory"):
                client.load("djinn-tiny", **other)
        client.load("djinn-tiny", host_kv_bytes=0)


def test_the_next_engine_finds_the_pages_unless_others_are_requested(serve):
    daemon = serve(Script(pages=1 << 16))
    with daemon.client() as client:
        client.load("djinn-tiny")
        wait_for(lambda: "pages: new" in str(notes(client)))
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: "pages: used, 65536 bytes" in str(notes(client)))
        assert client.status(check=True).integrity == []


def test_the_number_of_pages_is_as_configured_or_as_the_load_says(serve, checkpoint):
    models = {"mine": {"path": str(checkpoint), "host_kv": "64KiB", "disk_kv": 0}}
    daemon = serve(Script(pages=1 << 20), models=models)
    with daemon.client() as client:
        client.load("mine")
        wait_for(lambda: "65536 bytes" in str([m.notes for m in client.models()]))
        client.unload("mine")
        client.load("mine", host_kv_bytes=1 << 17)
        wait_for(lambda: "131072 bytes" in str([m.notes for m in client.models()]))


def test_a_model_is_served_without_pages_that_found_no_room(serve):
    daemon = serve(Script(pages=1 << 60))
    with djinn.Session("djinn-tiny", address=daemon.address) as session, daemon.client() as client:
        wait_for(lambda: "host_kv of djinn-tiny needs 1,152,921,504,606,851,072 bytes" in str(notes(client)))
        assert len(session.generate("Hello", max_tokens=2).token_ids) == 2
        assert len(daemon.arena()) == 1 and client.status(check=True).integrity == []


def test_a_model_that_killed_two_engines_is_set_aside_and_an_administrator_may_try_it_again(serve, checkpoint):
    """Its pages are removed, and all other models are served."""
    guilty = str(checkpoint)
    script = Script(pages=1 << 16, keep_host=False, on_load={guilty: "die"})
    daemon = serve(script)
    with daemon.client() as client, djinn.Session("djinn-tiny", address=daemon.address) as session:
        wait_for(lambda: len(daemon.arena()) == 1)
        for deaths in (2, 3):
            with pytest.raises(errors.ModelRejected, match="engines have died while") as caught:
                client.load(guilty)
            assert caught.value.data["deaths"] == 2
            wait_for(lambda deaths=deaths: client.status().devices[0].restarts == deaths)
            wait_for(lambda: {model.name: model.state for model in client.models()}["djinn-tiny"] == "ready")
            aside = next(model for model in client.models() if model.name == guilty)
            assert aside.state == "set aside" and "djinnctl load" in aside.error
            with pytest.raises(errors.ModelRejected, match="engines have died while"):
                djinn.Session(guilty, address=daemon.address).generate([5])
            assert session.generate([5], max_tokens=1).token_ids
        assert daemon.starts == 4 and len(daemon.arena()) == 1
        assert client.status(check=True).integrity == []
        script.on_load = {}
        daemon.write_files()
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 4)
        assert client.load(guilty).state == "ready"


def test_of_several_models_loaded_at_once_the_one_that_kills_engines_is_set_aside(serve, checkpoint):
    script, innocent = Script(on_load={"djinn-tiny": "die"}), str(checkpoint)
    daemon = serve(script)
    with Wire(daemon.address) as one, Wire(daemon.address) as other, daemon.client() as client:
        one.send(LoadModel(id=1, model=innocent))
        other.send(LoadModel(id=1, model="djinn-tiny"))
        replies = [reply_of(wire) for wire in (one, other)]
        assert isinstance(replies[0], ModelReply) and replies[1].code == "model_rejected"
        states = {model.name: model.state for model in client.models()}
        wait_for(lambda: {model.name: model.state for model in client.models()}[innocent] == "ready")
        assert states["djinn-tiny"] == "set aside"


def reply_of(wire):
    while isinstance(reply := wire.reply(), Progress):
        pass
    return reply


def test_unloading_by_force_closes_the_sessions_and_ends_their_calls(serve):
    daemon = serve(gated=True)
    with daemon.client() as client, Wire(daemon.address) as wire:
        client.load("djinn-tiny")
        session = wire.ask(OpenSession(id=1, model="djinn-tiny")).session.id
        wire.send(Generate(id=2, session=session, token_ids=[5]))
        client.unload("djinn-tiny", force=True)
        reply = wire.reply()
        assert isinstance(reply, Generated) and reply.finish_reason == "cancelled"
        assert client.sessions() == [] and daemon.arena() == []


def test_all_waiting_requests_get_a_load_s_failure_and_the_next_load_starts_again(serve, checkpoint):
    name = str(checkpoint)
    daemon = serve(Script(on_load={name: "fail"}))
    wires = [Wire(daemon.address) for _ in range(3)]
    for _ in range(2):
        for wire in wires:
            wire.send(OpenSession(id=1, model=name))
        for wire in wires:
            reply = collect(wire)[-1]
            assert (reply.code, reply.message) == ("model_rejected", f"{name} lacks a tensor")
    assert daemon.log.count("model_failed") >= 2
    assert [model.name for model in wires[0].ask(ListModels(id=2)).models] == ["djinn-tiny"]
    for wire in wires:
        wire.socket.close()


def test_a_configured_model_that_fails_has_its_error_in_the_list(serve, checkpoint):
    daemon = serve(Script(on_load={"mine": "fail"}), models={"mine": {"path": str(checkpoint), "preload": True}})
    with daemon.client() as client:
        wait_for(lambda: "model_failed" in daemon.log)
        (model,) = (model for model in client.models() if model.name == "mine")
        assert (model.state, model.error) == ("failed", "mine lacks a tensor")
        assert client.status(check=True).integrity == []


def test_a_model_s_configuration_reaches_the_engine(serve, checkpoint):
    daemon = serve(models={"mine": {"path": str(checkpoint), "kv": "3MiB", "dtype": "float32", "preload": True}})
    with daemon.client() as client:
        wait_for(lambda: "model_ready" in daemon.log)
        (model,) = (model for model in client.models() if model.name == "mine")
        assert (model.kv_bytes, model.dtype, model.path) == (3 << 20, "float32", str(checkpoint))


def test_a_load_chooses_the_number_of_pages(serve, checkpoint):
    daemon = serve()
    with daemon.client() as client:
        assert client.load(str(checkpoint), kv_bytes=5 << 20).kv_bytes == 5 << 20
        client.unload(str(checkpoint))
        assert [model.name for model in client.models()] == ["djinn-tiny"], "the other model must be forgotten"


def test_blocks_are_placed_as_configured_unless_the_load_says_otherwise(serve, checkpoint):
    daemon = serve(models={"mine": {"path": str(checkpoint), "resident": 0.5, "kv": "3MiB"}})
    with daemon.client() as client:
        assert client.plan("mine").blocks_plain == 4
        assert client.load("mine").blocks_plain == 4
        client.unload("mine")
        other = client.load("mine", resident=3, kv_bytes=5)
        assert (other.blocks_plain, other.blocks_streamed, other.kv_bytes) == (3, 5, 5)
        assert client.load("mine", resident=3).blocks_plain == 3
        with pytest.raises(errors.InvalidRequest, match="unload it first, to change the placement of its blocks"):
            client.load("mine", resident=4)
        client.unload("mine")
        configured = client.load("mine")
        assert (configured.blocks_plain, configured.kv_bytes) == (4, 3 << 20)
        assert client.status(check=True).integrity == []


def test_the_settings_of_a_failed_load_are_forgotten(serve, checkpoint):
    (checkpoint / "tokenizer.json").write_text("{")
    daemon = serve(models={"mine": {"path": str(checkpoint)}})
    with daemon.client() as client:
        with pytest.raises(errors.ModelRejected):
            client.load("mine", resident=3)
        (checkpoint / "tokenizer.json").unlink()
        assert client.load("mine").blocks_plain == 8


def test_other_settings_for_a_model_that_is_being_loaded_are_refused(serve):
    daemon = serve(Script(on_start={"1": "hang"}))
    with Wire(daemon.address) as one, Wire(daemon.address) as two:
        one.send(LoadModel(id=1, model="djinn-tiny", placing=Placing(resident=3)))
        wait_for(lambda: two.ask(ListModels(id=1)).models[0].state == "loading")
        for fields in ({"placing": Placing()}, {"kv_bytes": 7}):
            reply = two.ask(LoadModel(id=2, model="djinn-tiny", **fields))
            assert (reply.code, "is being loaded already" in reply.message) == ("invalid_request", True)
        wait_for(lambda: daemon.starts == 1)
        daemon.kill_starting_engine()
        assert collect(one)[-1].model.blocks_plain == 3


def test_the_next_engine_places_blocks_as_the_last(serve):
    daemon = serve()
    with daemon.client() as client:
        client.load("djinn-tiny", resident=3)
        os.kill(client.status().devices[0].pid, signal.SIGKILL)
        wait_for(lambda: client.status().devices[0].restarts == 1)
        assert client.load("djinn-tiny").blocks_plain == 3


def test_a_plan_for_an_unknown_model_leaves_it_unknown(serve, checkpoint):
    daemon = serve()
    with Wire(daemon.address) as wire:
        plan = wire.ask(PlanModel(id=1, model=str(checkpoint), memory_bytes=5 << 13)).plan
        assert (plan.blocks_plain, plan.streamed_bytes) == (2, 6 << 13)
        assert [(m.name, m.state) for m in wire.ask(ListModels(id=2)).models] == [("djinn-tiny", "available")]
        assert daemon.arena() == []


def test_a_lack_of_shared_memory_is_reported_with_figures(serve, checkpoint):
    daemon = serve(Script(on_load={"djinn-tiny": "big"}))
    with daemon.client() as client:
        with pytest.raises(errors.OutOfMemory, match="mount -o remount") as caught:
            client.load("djinn-tiny")
        assert caught.value.data["needed"] == 4096 + (1 << 60)
        assert daemon.arena() == []
        client.load(str(checkpoint))


def test_a_cancelled_load_continues_for_other_requests(serve):
    daemon = serve(Script(on_start={"1": "hang"}))
    with Wire(daemon.address) as one, Wire(daemon.address) as two:
        one.send(LoadModel(id=1, model="djinn-tiny"))
        two.send(LoadModel(id=1, model="djinn-tiny"))
        one.send(Cancel(target=1))
        reply = one.reply()
        assert (reply.id, reply.code) == (1, "cancelled")
        wait_for(lambda: daemon.starts == 1)
        daemon.kill_starting_engine()
        assert isinstance(collect(two)[-1], ModelReply)


def test_a_model_without_a_tokenizer_takes_and_gives_tokens(serve, checkpoint):
    daemon = serve()
    with djinn.Session(str(checkpoint), address=daemon.address) as session:
        assert session.generate([5], max_tokens=3).token_ids == [2, 3, 1]
        assert [piece.token_ids for piece in session.stream(max_tokens=2)] == [[2], [3]]
        with pytest.raises(errors.NoTokenizer):
            session.generate("text")
        with pytest.raises(errors.NoTokenizer):
            session.generate([5], stop=["x"])


def test_a_damaged_tokenizer_is_refused_before_the_engine_is_asked(serve, checkpoint):
    (checkpoint / "tokenizer.json").write_text("{")
    daemon = serve()
    with daemon.client() as client:
        with pytest.raises(errors.ModelRejected, match=r"tokenizer\.json"):
            client.load(str(checkpoint))
        assert client.status(check=False).models[0].name == "djinn-tiny"


def test_the_model_s_own_end_token_ends_an_output_unless_it_is_ignored(serve, checkpoint):
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 9]}))
    daemon = serve()
    with djinn.Session(str(checkpoint), address=daemon.address) as session:
        reply = session.generate([5], max_tokens=9)
        assert (reply.token_ids, reply.finish_reason) == ([2, 3], "stop")
        assert session.generate(max_tokens=5, ignore_eos=True).finish_reason == "length"


def test_loading_and_unloading_at_once_end_in_one_of_both_states(serve):
    daemon = serve()
    wires = [Wire(daemon.address) for _ in range(4)]
    for number in range(10):
        for wire in wires[:2]:
            wire.send(LoadModel(id=number, model="djinn-tiny"))
        for wire in wires[2:]:
            wire.send(UnloadModel(id=number, model="djinn-tiny"))
        for wire in wires[:2]:
            assert isinstance(collect(wire)[-1], ModelReply)
        for wire in wires[2:]:
            reply = wire.reply()
            assert reply == Done(id=number) or reply.code == "invalid_request"
    for wire in wires:
        wire.socket.close()
    with daemon.client() as client:
        assert client.status(check=True).integrity == []


def test_a_model_pulled_by_the_daemon_s_own_user_is_found_by_its_hub_id(serve, folder, monkeypatch):
    """A program over HTTP finds it too, which cannot look for it. It is the same model as its folder."""
    monkeypatch.setenv("DJINN_MODELS", str(folder / "pulled"))
    shutil.copytree(TINY, folder / "pulled" / "org" / "name")
    daemon = serve()
    with Wire(daemon.address) as wire:
        for number, name in enumerate(("org/name", str(folder / "pulled" / "org" / "name"), "org/name")):
            wire.send(OpenSession(id=number, model=name))
            assert collect(wire)[-1].session.model == str(folder / "pulled" / "org" / "name")
