"""Adapters on a CUDA device: kernels and graphs give what the merged checkpoints give."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from tests.support import reference
from tests.support.adapters import KINDS, load_adapter, merged, open_with, write_adapter
from tests.support.cuda import cuda_device
from tests.support.engine_thread import EngineThread
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model

pytestmark = pytest.mark.gpu
MODEL = reduced_model("llama-3.1")
NEW = 24


@pytest.fixture
def engine() -> Iterator[EngineThread]:
    with cuda_device() as device, EngineThread(device, max_batch_tokens=128, max_rows=16) as engine:
        engine.loaded(MODEL, dtype="float32", max_context=512)
        yield engine


def test_a_batch_of_five_adapters_and_none_eager_and_as_a_graph(engine: EngineThread, tmp_path: Path) -> None:
    """The second round replays what the first one has captured."""
    folders = [write_adapter(tmp_path / str(n), MODEL, n, **kind) for n, kind in enumerate(KINDS)]
    checkpoints = [*(merged(tmp_path / f"merged-{folder.name}", MODEL, folder) for folder in folders), MODEL]
    identities = [*(load_adapter(engine, folder) for folder in folders), b""]
    told = {}
    for turn in range(2):
        runs = {}
        for n in range(12):
            open_with(engine, f"s{turn}.{n}", identities[n % 6])
            runs[n] = engine.run_message(f"s{turn}.{n}", random_prompt(3 + 17 * n, 512, n), NEW)
        engine.send(*runs.values())
        outcomes = engine.outcomes([run.request for run in runs.values()])
        told[turn] = {n: outcomes[run.request][0] for n, run in runs.items()}
    captured = engine.runner().graphs.current
    assert captured is not None and any(shape.adapters for shape in captured._captured)
    assert engine.runner().model.install_adapters().has_kernels
    for n in sorted(told[0], key=lambda each: each % 6):
        expected = reference.greedy(checkpoints[n % 6], random_prompt(3 + 17 * n, 512, n), NEW, told[0][n])
        assert told[0][n] == told[1][n] == expected, n
    engine.report()
