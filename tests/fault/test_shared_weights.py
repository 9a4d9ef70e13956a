"""Clients that hand over something other than a model: each gets the fault in its error, and nothing else happens."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoConfig

import djinn_client as djinn
from djinn_client.protocol import Failure, ModelReply, Progress, ShareDescribed, ShareModel, ShareWeights, encode
from djinn_client.protocol.fields.image import Image
from djinn_client.transport.shm import IMAGE_SEALS
from tests.conftest import MODEL, DaemonStarter
from tests.support import reference
from tests.support.daemon import Daemon, descriptors_of, wait_for
from tests.support.models import reduced_model, tiny_model
from tests.support.served import Wire

PROMPT = [300, 20, 101, 7, 55, 430, 12]
CONFIG = AutoConfig.from_pretrained(reduced_model("llama-2")).to_json_string().encode()


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        yield start(errors=["model_failed"])


@pytest.fixture
def wire(daemon: Daemon) -> Iterator[Wire]:
    """A connection. Afterwards the daemon must have nothing left of it, and work."""
    with Wire(daemon.address) as wire:
        yield wire
    with daemon.client() as client:
        wait_for(lambda: client.status().connections == 1)
        wait_for(lambda: [model.name for model in client.models()] == [MODEL])
        wait_for(lambda: not list((daemon.folder / "state" / "shared").glob("*")))
        wait_for(lambda: "/memfd" not in descriptors_of(daemon.pid))
        assert client.status(check=True).integrity == []
        assert client.status().devices[0].restarts == 0
    with djinn.Session(MODEL, address=daemon.address) as s:
        expected = reference.greedy(tiny_model(), PROMPT, 4)
        assert s.generate(PROMPT, max_tokens=4, ignore_eos=True).token_ids == expected
    djinn.unload(MODEL, address=daemon.address)


@contextmanager
def memory(content: bytes = b"") -> Iterator[int]:
    fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    try:
        os.pwrite(fd, content, 0)
        yield fd
    finally:
        os.close(fd)


def ask(wire: Wire, request: object, *fds: int) -> object:
    """Sends a request with these descriptors, and returns the final reply."""
    socket.send_fds(wire.socket, [encode(request, len(fds))], fds)  # type: ignore[arg-type]
    while isinstance(reply := wire.reply(), Progress):
        pass
    return reply


def refusal(reply: object) -> str:
    assert isinstance(reply, Failure), reply
    return f"{reply.code}: {reply.message}"


def share_request(**changes: object) -> ShareModel:
    fields = {"id": 1, "model": "mine", "files": {"config.json": len(CONFIG)}, "stored": "bfloat16"}
    return ShareModel(**fields | {"dtype": "bfloat16", "kv_bytes": 32 << 20} | changes)  # type: ignore[arg-type]


def described(wire: Wire) -> tuple[str, Image]:
    with memory(CONFIG) as files:
        reply = ask(wire, share_request(), files)
    assert isinstance(reply, ShareDescribed), reply
    assert any(buffer.units for buffer in reply.image.buffers)
    return reply.share, reply.image


def hand_over(wire: Wire, share: str, fd: int, seals: int = IMAGE_SEALS) -> object:
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return ask(wire, ShareWeights(id=2, share=share), fd)


@pytest.mark.parametrize("missing", [fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW, fcntl.F_SEAL_WRITE])
def test_weights_that_could_still_change(missing: int, wire: Wire) -> None:
    share, image = described(wire)
    with memory() as fd:
        os.posix_fallocate(fd, 0, image.nbytes)
        told = refusal(hand_over(wire, share, fd, IMAGE_SEALS & ~missing))
    assert told.startswith("invalid_request: ") and "must be sealed against shrinking, growing and writing" in told


@pytest.mark.smoke
def test_weights_of_another_size(wire: Wire) -> None:
    for wrong in (-4096, 4096):
        share, image = described(wire)
        with memory() as fd:
            os.posix_fallocate(fd, 0, image.nbytes + wrong)
            told = refusal(hand_over(wire, share, fd))
        assert f"has {image.nbytes + wrong:,} bytes; {image.nbytes:,} were announced" in told


def test_weights_that_were_truncated_before_they_were_sealed(wire: Wire) -> None:
    """Then the file was extended to its former size: behind the cut there is no memory, and reading there would find
    none."""
    share, image = described(wire)
    with memory() as fd:
        os.posix_fallocate(fd, 0, image.nbytes)
        os.ftruncate(fd, 4096)
        os.ftruncate(fd, image.nbytes)
        told = refusal(hand_over(wire, share, fd))
    assert f"has memory for 4,096 of {image.nbytes:,} bytes" in told


def test_weights_that_cannot_be_opened_are_refused(wire: Wire) -> None:
    """Root can open them; any other daemon reports that it cannot."""
    share, image = described(wire)
    with memory() as fd:
        os.posix_fallocate(fd, 0, image.nbytes)
        os.fchmod(fd, 0)
        told = refusal(hand_over(wire, share, fd))
    assert "cannot be opened for reading" in told or "not a packed block" in told


def test_garbage_in_the_place_of_packed_blocks(wire: Wire) -> None:
    share, image = described(wire)
    with memory() as fd:
        os.pwrite(fd, os.urandom(image.nbytes), 0)
        told = refusal(hand_over(wire, share, fd))
    assert told.startswith("model_rejected: mine: the shared weights of model.layers.0: not a packed block")


def test_garbage_behind_the_heads_of_packed_blocks(daemon: Daemon, wire: Wire) -> None:
    """The model gives wrong tokens, and nothing else happens: patches with invalid positions are not followed."""
    share, image = described(wire)
    buffer = image.buffers[0]
    assert buffer.units
    head = torch.zeros(64, dtype=torch.int32)
    head[:4] = torch.tensor([0x706A6A64, 1, 8, len(buffer.units)])
    head[16 : 16 + len(buffer.units)] = 110
    with memory() as fd:
        os.pwrite(fd, bytes(image.nbytes), 0)
        for block in image.buffers[:-1]:
            os.pwrite(fd, os.urandom(block.extent), block.offset)
            os.pwrite(fd, head.numpy().tobytes(), block.offset)
        reply = hand_over(wire, share, fd)
    if isinstance(reply, ModelReply):
        with djinn.Session("mine", address=daemon.address) as s:
            s.generate(PROMPT, max_tokens=8, ignore_eos=True)
    else:
        assert "model_rejected" in refusal(reply)


def test_descriptors_that_are_no_memfds_are_refused(wire: Wire) -> None:
    share, _ = described(wire)
    reader, writer = os.pipe()
    told = refusal(ask(wire, ShareWeights(id=2, share=share), reader))
    assert "the descriptor is no memfd" in told
    told = refusal(ask(wire, share_request(model="another"), reader))
    assert "the descriptor is no memfd" in told
    os.close(reader)
    os.close(writer)


def test_exactly_one_descriptor_is_needed(wire: Wire) -> None:
    share, _ = described(wire)
    with memory(CONFIG) as fd:
        assert "0 came" in refusal(wire.ask(ShareWeights(id=2, share=share)))
        assert "a request that takes 1" in refusal(ask(wire, ShareWeights(id=2, share=share), fd, fd))
        assert "0 came" in refusal(wire.ask(share_request(model="another")))
        assert "takes 1" in refusal(ask(wire, share_request(model="another"), fd, fd, fd))


def test_files_that_differ_from_their_announcement_are_refused(wire: Wire) -> None:
    for files, content, words in (
        ({"config.json": 10_000}, CONFIG, f"config.json ends after {len(CONFIG):,} of 10,000 bytes"),
        ({"config.json": 300 << 20}, CONFIG, "at most 67,108,864"),
        ({"config.json": -1}, CONFIG, "at most"),
        ({}, CONFIG, "must bring its config.json"),
        ({"config.json": 2, "../../x": 4}, b"{}....", "not '../../x'"),
        ({"config.json": 2, "modeling_x.py": 4}, b"{}....", "not 'modeling_x.py'"),
        ({"config.json": 4}, b"{{{{", "config.json"),
    ):
        with memory(content) as fd:
            told = refusal(ask(wire, share_request(files=files), fd))
        assert words in told, told
    code = json.loads(CONFIG) | {"model_type": "mine", "auto_map": {"AutoConfig": "modeling_x.Config"}}
    with memory(json.dumps(code).encode()) as fd:
        told = refusal(ask(wire, share_request(files={"config.json": len(json.dumps(code))}), fd))
    assert told.startswith("model_rejected: ")


def test_unknown_shares_are_refused(daemon: Daemon, wire: Wire) -> None:
    share, image = described(wire)
    with memory() as fd, Wire(daemon.address) as another:
        os.posix_fallocate(fd, 0, image.nbytes)
        assert "no such share" in refusal(hand_over(wire, "nonsense", fd))
        assert "no such share" in refusal(hand_over(another, share, fd))
        assert "not a packed block" in refusal(hand_over(wire, share, fd))
        assert "no such share" in refusal(hand_over(wire, share, fd))


def test_a_client_that_disconnects_between_the_two_requests(daemon: Daemon, wire: Wire) -> None:
    with Wire(daemon.address) as another:
        described(another)
        with memory(CONFIG) as fd:
            assert "is a model mine already" in refusal(ask(wire, share_request(), fd))
    with memory(CONFIG) as fd:
        wait_for(lambda: isinstance(ask(wire, share_request(), fd), ShareDescribed))
