"""Hostile input: at worst the client that sends it gets an error, and other clients notice nothing.

A bystander streams during every case, and at the end the daemon has in use what it had before the first.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import djinn_client as djinn
from djinn_client.protocol import (
    HEADER,
    MAGIC,
    MAX_REQUEST,
    VERSION,
    AttachSession,
    CloseSession,
    Failure,
    Forward,
    Generate,
    GetStatus,
    GetTokens,
    GetTrace,
    Ping,
    Request,
    Sampling,
    SetBudget,
    Truncate,
    UnloadModel,
    encode,
)
from tests.conftest import MODEL, DaemonStarter
from tests.support.bystander import Bystander
from tests.support.checkpoints import altered
from tests.support.daemon import Daemon, expect_held, holdings
from tests.support.models import reduced_model
from tests.support.other_user import NOBODY, as_user, only_root, open_to_all
from tests.support.served import Wire
from tools.checkpoints.random_models.layout import stored_tensors
from tools.checkpoints.shapes.named import config_of, shape_of

MISSING = (djinn.ModelNotFound, djinn.ModelRejected)
Errors = type[djinn.DjinnError] | tuple[type[djinn.DjinnError], ...]


@pytest.fixture(scope="module")
def target() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        daemon = start(errors=["model_failed"])
        with daemon.client() as client:
            client.load(MODEL, kv_bytes=64 << 20)
        with Bystander(daemon.address):
            pass  # resources of the first session, such as threads, exist from now on
        before = holdings(daemon)
        yield daemon
        expect_held(daemon, before)
        assert before["findings"] == []


@pytest.fixture
def address(target: Daemon) -> Iterator[str]:
    """Address of the daemon, which serves a bystander all the time."""
    with Bystander(target.address):
        yield target.address


# --- frames ---------------------------------------------------------------------------------------------------------


def frame(payload: bytes, version: int = VERSION, length: int | None = None) -> bytes:
    return HEADER.pack(MAGIC, version, 0, len(payload) if length is None else length) + payload


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "protocol_error"),
        (os.urandom(4096).replace(MAGIC, b"--"), "protocol_error"),
        (frame(b"\xc1" * 64), "protocol_error"),
        (frame(b"", version=VERSION + 1), "version_mismatch"),
        (frame(b"", length=MAX_REQUEST + 1), "frame_too_large"),
        (frame(b"", length=(1 << 32) - 1), "frame_too_large"),
    ],
    ids=["http", "noise", "no message", "wrong version", "over the limit", "far over it"],
)
def test_garbage(address: str, data: bytes, code: str) -> None:
    with Wire(address) as wire:
        wire.send_bytes(data)
        reply = wire.reply()
        assert isinstance(reply, Failure)
        assert (reply.id, reply.code) == (0, code)
        assert wire.reply() is None


@pytest.mark.smoke
@pytest.mark.parametrize("end", [socket.SHUT_WR, socket.SHUT_RDWR])
def test_a_frame_that_is_cut_short(address: str, end: int) -> None:
    with Wire(address) as wire:
        wire.send_bytes(encode(Ping(id=1))[:-1])
        wire.socket.shutdown(end)
        assert wire.reply() is None


def test_a_client_that_says_nothing_is_disconnected(target: Daemon, address: str) -> None:
    target.reload({"limits": {"handshake": "100ms"}})
    with Wire(address, hello=False) as silent, Wire(address, hello=False) as slow:
        slow.send_bytes(encode(Ping(id=1))[:3])
        for wire in (silent, slow):
            reply = wire.reply()
            assert isinstance(reply, Failure)
            assert "Hello" in reply.message
            assert wire.reply() is None
    target.reload({})


# --- requests -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"token_ids": [1] * 5000}, "prompt_too_long"),
        ({"text": "x = 1\n" * 5000}, "prompt_too_long"),
        ({"token_ids": [1, 2, 2048]}, "token_out_of_range"),
        ({"token_ids": [1], "stop_token_ids": [(1 << 31) - 1]}, "token_out_of_range"),
        ({"text": "x", "sampling": Sampling(temperature=math.nan)}, "invalid_request"),
        ({"text": "x", "sampling": Sampling(top_p=math.inf)}, "invalid_request"),
        ({"text": "x", "max_tokens": -1}, "invalid_request"),
        ({"text": "x", "max_tokens": 1 << 20}, "invalid_request"),
        ({"text": "x", "sampling": Sampling(logit_bias={5: math.nan})}, "invalid_request"),
        ({"text": "x", "sampling": Sampling(logit_bias=dict.fromkeys(range(1025), 1.0))}, "invalid_request"),
        ({}, "invalid_request"),
    ],
    ids=[
        "long prompt",
        "long text",
        "token",
        "stop token",
        "NaN",
        "infinity",
        "no tokens",
        "too many tokens",
        "bias",
        "biases",
        "no prompt",
    ],
)
def test_invalid_generations_are_refused(address: str, fields: dict[str, Any], code: str) -> None:
    with djinn.Session(MODEL, address=address) as s, Wire(address) as wire:
        reply = wire.ask(Generate(id=1, session=s.id, **fields))
        assert isinstance(reply, Failure)
        assert (reply.id, reply.code) == (1, code)
        assert s.token_ids() == []
        assert len(s.generate([1], max_tokens=2, ignore_eos=True).token_ids) == 2


def requests_for(session: str) -> list[Request]:
    return [
        AttachSession(id=1, session=session),
        Generate(id=1, session=session, text="x"),
        Forward(id=1, session=session, token_ids=[1]),
        Truncate(id=1, session=session, length=0),
        GetTokens(id=1, session=session),
        CloseSession(id=1, session=session),
    ]


@pytest.mark.smoke
def test_an_unknown_session(address: str) -> None:
    with Wire(address) as wire:
        for request in requests_for("0123456789abcdef"):
            reply = wire.ask(request)
            assert isinstance(reply, Failure)
            assert reply.code == "session_not_found"


@pytest.mark.smoke
@only_root
def test_another_user_s_session(target: Daemon, address: str) -> None:
    open_to_all(target.folder, address)
    with contextlib.ExitStack() as stack:
        mine = stack.enter_context(djinn.Session(MODEL, address=address))
        tokens = mine.forward([1, 2, 3]) is not None and mine.token_ids()
        with as_user():
            wire = stack.enter_context(Wire(address))
            theirs = stack.enter_context(djinn.Session(MODEL, address=address))
            client = stack.enter_context(djinn.Client(address))
            assert client.welcome().user == NOBODY
        unknown = wire.ask(GetTokens(id=1, session="0123456789abcdef"))
        assert isinstance(unknown, Failure)
        for request in requests_for(mine.id):
            reply = wire.ask(request)
            assert isinstance(reply, Failure)
            assert reply.message.replace(mine.id, "0123456789abcdef") == unknown.message  # the errors are the same
        assert [info.id for info in client.sessions()] == [theirs.id]
        for request in (
            GetStatus(id=1, check=True),
            UnloadModel(id=1, model=MODEL, force=True),
            SetBudget(id=1, memory_bytes=1 << 30),
            GetTrace(id=1),
        ):
            reply = wire.ask(request)
            assert isinstance(reply, Failure)
            assert reply.code == "not_permitted"
        assert len(theirs.generate("x", max_tokens=2, ignore_eos=True).token_ids) == 2
        assert mine.token_ids() == tokens


# --- models ---------------------------------------------------------------------------------------------------------


def cut_short(folder: Path) -> None:
    file = altered(folder) / "model.safetensors"
    os.truncate(file, file.stat().st_size // 2)


def no_header(folder: Path) -> None:
    (altered(folder) / "model.safetensors").write_bytes(b"\xff" * 64)


def lacking_a_tensor(folder: Path) -> None:
    altered(folder, change=lambda tensors: tensors.pop("model.layers.2.mlp.up_proj.weight"))


def wrongly_shaped(folder: Path) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    altered(folder, change=lambda tensors: tensors.update({name: tensors[name][:-1]}))


def of_integers(folder: Path) -> None:
    name = "model.norm.weight"
    altered(folder, change=lambda tensors: tensors.update({name: tensors[name].to(torch.int32)}))


def no_json(folder: Path) -> None:
    (altered(folder) / "config.json").write_text("{")


def of_no_family(folder: Path) -> None:
    altered(folder, config={"model_type": "nonesuch"})


def with_a_broken_tokenizer(folder: Path) -> None:
    (altered(folder) / "tokenizer.json").write_text('{"version": 7}')


def larger_than_the_budget(folder: Path) -> None:
    """A checkpoint with weights that are a hole in a file."""
    altered(folder)
    config = config_of("llama-2-7b", dtype="float32", reduced=True) | {"intermediate_size": 1_600_000}
    (folder / "config.json").write_text(json.dumps(config))
    header, end = {}, 0
    for tensor in stored_tensors(shape_of("llama-2-7b"), config, torch.float32):
        offsets = [end, end := end + tensor.nbytes]
        header[tensor.name] = {"dtype": "F32", "shape": tensor.size, "data_offsets": offsets}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.mark.parametrize(
    ("spoil", "error", "words"),
    [
        (lambda folder: folder.rmdir(), MISSING, "there is no such folder"),
        (lambda folder: None, MISSING, r"config\.json"),
        (lambda folder: (altered(folder) / "model.safetensors").unlink(), MISSING, r"model\.safetensors"),
        (cut_short, djinn.ModelRejected, "model.safetensors is damaged or cut short"),
        (no_header, djinn.ModelRejected, "model.safetensors is damaged or cut short"),
        (lacking_a_tensor, djinn.ModelRejected, r"model\.layers\.2\.mlp\.up_proj\.weight"),
        (wrongly_shaped, djinn.ModelRejected, r"model\.layers\.1\.self_attn\.k_proj\.weight.*63, 64"),
        (of_integers, djinn.ModelRejected, r"model\.norm\.weight.*I32"),
        (no_json, djinn.ModelRejected, r"config\.json"),
        (of_no_family, djinn.ModelRejected, "nonesuch"),
        (with_a_broken_tokenizer, djinn.ModelRejected, r"tokenizer\.json"),
        (larger_than_the_budget, djinn.OutOfMemory, r"at least .*, and .* of the budget of 1\.00 GiB is free"),
    ],
    ids=lambda value: getattr(value, "__name__", "").strip("<>") or None,
)
def test_a_damaged_checkpoint_is_refused(
    address: str, tmp_path: Path, spoil: Callable[[Path], Any], error: Errors, words: str
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    spoil(folder)
    with pytest.raises(error, match=words):
        djinn.load(str(folder), address=address)
    with pytest.raises(error, match=words):
        djinn.Session(str(folder), address=address)
    assert [model.name for model in djinn.models(address=address)] == [MODEL]


def test_pages_larger_than_the_budget(address: str) -> None:
    model = str(reduced_model("llama-2"))
    with pytest.raises(djinn.OutOfMemory, match=r"needs at least 2\.\d\d GiB .* of the budget of 1\.00 GiB") as caught:
        djinn.load(model, kv_bytes=2 << 30, address=address)
    assert caught.value.data["budget"] == 1 << 30
    assert djinn.load(model, kv_bytes=1 << 20, address=address).state == "ready"
    djinn.unload(model, address=address)


# --- too much -------------------------------------------------------------------------------------------------------


def test_a_flood_of_requests_on_one_connection(address: str) -> None:
    """Each request has exactly one final reply; requests beyond the limits get an error. They are written by a thread,
    because the daemon stops reading while its replies are not read."""
    count = 3000
    with djinn.Session(MODEL, address=address) as s, Wire(address) as wire:
        requests = [Generate(id=n, session=s.id, text="x = ", max_tokens=4, ignore_eos=True) for n in range(1, count)]
        writer = threading.Thread(target=wire.send, args=(*requests, Ping(id=count)))
        writer.start()
        replies = [wire.reply() for _ in range(count)]
        writer.join()
        answered = sorted(reply.id for reply in replies if reply is not None)
        assert answered == list(range(1, count + 1))
        codes = {reply.code for reply in replies if isinstance(reply, Failure)}
        assert codes <= {"session_busy", "retry"}
        assert len(s.token_ids()) >= 4


def test_three_hundred_connections(target: Daemon, address: str) -> None:
    before = djinn.status(address=address).connections
    with contextlib.ExitStack() as stack:
        clients = [stack.enter_context(target.client()) for _ in range(300)]
        for client in clients:
            client.ping()
        assert clients[0].status().connections == before - 1 + 300
        sessions = [stack.enter_context(djinn.Session(MODEL, address=address)) for _ in range(30)]
        assert {len(s.generate("x", max_tokens=2, ignore_eos=True).token_ids) for s in sessions} == {2}


@pytest.mark.parametrize("name", ["tokenizer.json", "generation_config.json", "config.json", "model.safetensors"])
def test_a_pipe_in_place_of_a_file_is_refused(address: str, tmp_path: Path, name: str) -> None:
    """No process writes to it: reading from it would block for ever."""
    folder = altered(tmp_path / "checkpoint")
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with contextlib.suppress(djinn.ModelNotFound, djinn.ModelRejected, djinn.InvalidRequest):
        djinn.load(str(folder), kv_bytes=1 << 20, address=address)
        djinn.unload(str(folder), address=address)
