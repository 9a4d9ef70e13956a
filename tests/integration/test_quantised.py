"""Quantised checkpoints: the daemon's tokens are those of transformers with the decoded weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import djinn_client as djinn
from tests.conftest import DaemonStarter
from tests.support import reference
from tests.support.daemon import Daemon
from tests.support.quantised import FP8, fp8_blocks, write_quantised

PROMPT = [5, 9, 2, 77, 31, 8]
NEW = 16


@pytest.fixture(scope="module")
def daemon() -> Iterator[Daemon]:
    with DaemonStarter() as start:
        yield start(errors=["model_failed"])


def test_an_fp8_checkpoint_is_served_by_its_folder(daemon: Daemon, tmp_path: Path) -> None:
    folder = write_quantised(tmp_path / "m", fp8_blocks(), FP8)
    with daemon.client() as client:
        assert {"fp8 (128 x 128 blocks)", "weights as they are stored: fp8"} <= set(client.plan(str(folder)).notes)
    with djinn.Session(str(folder), address=daemon.address) as s:
        tokens = s.generate(PROMPT, max_tokens=NEW, ignore_eos=True).token_ids
    assert tokens == reference.greedy(folder / "plain", PROMPT, NEW, tokens)


def test_a_method_that_is_not_served_is_refused_by_its_name(daemon: Daemon, tmp_path: Path) -> None:
    folder = write_quantised(tmp_path / "m", fp8_blocks(), {"quant_method": "bitsandbytes", "load_in_4bit": True})
    with (
        daemon.client() as client,
        pytest.raises(djinn.ModelRejected, match=r"quantised by bitsandbytes, .*served are"),
    ):
        client.load(str(folder))
