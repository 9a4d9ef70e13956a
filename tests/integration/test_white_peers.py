"""The peers of the white-box table, in their process: a hook and nnsight give the same tokens for an edit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import reduced_model
from tools.bench.peers.whitebox_job import PEERS, Job, measure
from tools.bench.stream.outcome import Status

PROMPTS = [[5, 9, 33, 40, 7], [300, 20, 101, 7, 55]]


@pytest.mark.long
def test_both_peers_give_the_same_edited_tokens(tmp_path: Path) -> None:
    job = Job(
        checkpoint=str(reduced_model("gpt2")),
        device="cpu",
        dtype="float32",
        prompts=PROMPTS,
        blocks=[1, 3],
        scale=0.5,
        tokens=6,
        answer=str(tmp_path / "answer.json"),
    )
    answer = measure(job, tmp_path)
    assert [answer.peers[name].status for name in PEERS] == [Status.MEASURED] * 2, (tmp_path / "peers.log").read_text()
    hooks, nnsight = (answer.peers[name].edited for name in PEERS)
    for blocks in job.blocks:
        assert hooks[blocks].tokens == nnsight[blocks].tokens != answer.plain
        assert len(nnsight[blocks].seconds) == len(PROMPTS)
