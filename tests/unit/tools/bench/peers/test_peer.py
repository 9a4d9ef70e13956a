from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.support.models import reduced_model
from tools.bench.peers import transformers as peer_transformers
from tools.bench.peers.peer import Offloaded, serve
from tools.bench.stream.outcome import Job, Outcome, Status


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    asked = Job(
        checkpoint=str(reduced_model("llama-2")),
        device="cpu",
        dtype="float32",
        memory=0,
        resident=2,
        prompt=list(range(3, 19)),
        tokens=2,
        runs=2,
        logits=str(tmp_path / "logits.npy"),
        outcome=str(tmp_path / "outcome.json"),
    )
    (tmp_path / "job.json").write_bytes(msgspec.json.encode(asked))
    monkeypatch.setattr(sys, "argv", ["peer", str(tmp_path / "job.json")])
    return asked


def answer(job: Job) -> Outcome:
    return msgspec.json.decode(Path(job.outcome).read_bytes(), type=Outcome)


def test_the_figures_and_the_logits_are_in_the_jobs_files(job: Job) -> None:
    serve(peer_transformers.build)
    outcome = answer(job)
    assert outcome.status is Status.MEASURED and outcome.found is not None
    assert (len(outcome.found.first_token_s), len(outcome.found.step_s[1])) == (2, 2)
    logits = np.load(job.logits)
    assert (logits.shape, logits.dtype) == ((16, 512), np.float32)


def test_too_little_memory_is_an_outcome(job: Job) -> None:
    def build(job: Job) -> Offloaded:
        raise torch.OutOfMemoryError("Tried to allocate 50 MiB. 9 MiB is free. Of the allocated memory 21 GiB is …")

    serve(build)
    assert answer(job) == Outcome(status=Status.OUT_OF_MEMORY, note="Tried to allocate 50 MiB. 9 MiB is free.")


def test_a_missing_package_is_an_outcome(job: Job) -> None:
    def build(job: Job) -> Offloaded:
        raise ModuleNotFoundError("No module named 'x'", name="importlib_metadata")

    serve(build)
    assert answer(job) == Outcome(status=Status.SKIPPED, note="importlib_metadata is not installed")
