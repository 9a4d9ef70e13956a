from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import reduced_model
from tools.bench.peers.accelerate import device_map
from tools.bench.peers.peer import blocks_of, skeleton, weight_bytes
from tools.bench.stream import peers
from tools.bench.stream.outcome import Job, Status


def job(checkpoint: Path, folder: Path, device: str = "cpu") -> Job:
    return Job(
        checkpoint=str(checkpoint),
        device=device,
        dtype="float32",
        memory=0,
        resident=3,
        prompt=list(range(3, 19)),
        tokens=2,
        runs=1,
        logits=str(folder / "logits.npy"),
        outcome=str(folder / "outcome.json"),
    )


@pytest.mark.parametrize(("family", "blocks"), [("llama-2", "model.layers"), ("gpt2", "transformer.h")])
def test_every_weight_has_a_place_and_only_the_last_blocks_leave_the_device(
    family: str, blocks: str, tmp_path: Path
) -> None:
    model = skeleton(job(reduced_model(family), tmp_path))
    places = device_map(model, 3, "cuda:0")
    assert {name for name, place in places.items() if place == "cpu"} == {f"{blocks}.3"}
    for weight, _ in model.named_parameters():
        assert sum(weight.startswith(f"{name}.") for name in places) == 1, weight


def test_the_blocks_are_found_with_their_bytes(tmp_path: Path) -> None:
    model = skeleton(job(reduced_model("llama-2"), tmp_path))
    name, blocks = blocks_of(model)
    assert (name, len(blocks)) == ("model.layers", 4)
    rest = weight_bytes([model.model.embed_tokens, model.model.norm, model.lm_head])
    assert weight_bytes(blocks) + rest == weight_bytes([model])


def test_a_peer_that_needs_cuda_is_skipped_without_it(tmp_path: Path) -> None:
    outcome = peers.measure("accelerate", job(tmp_path, tmp_path), tmp_path, limit_s=1)
    assert (outcome.status, outcome.note) == (Status.SKIPPED, "needs CUDA")


def test_a_package_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(peers.PEERS, "deepspeed", peers.Peer("deepspeed", "no_such_package"))
    outcome = peers.measure("deepspeed", job(tmp_path, tmp_path, "cuda:0"), tmp_path, limit_s=1)
    assert (outcome.status, outcome.note) == (Status.SKIPPED, "no_such_package is not installed")


@pytest.mark.long
def test_a_peer_that_crashes_has_an_outcome_with_its_last_line(tmp_path: Path) -> None:
    outcome = peers.measure("gpu-only", job(tmp_path / "nowhere", tmp_path), tmp_path, limit_s=60)
    assert outcome.status is Status.FAILED
    assert outcome.note.startswith("exit code 1: ") and "nowhere" in outcome.note


def test_a_peer_that_does_not_end_is_stopped(tmp_path: Path) -> None:
    outcome = peers.measure("gpu-only", job(tmp_path / "nowhere", tmp_path), tmp_path, limit_s=0.05)
    assert (outcome.status, outcome.note) == (Status.FAILED, "no result within 0 s")
