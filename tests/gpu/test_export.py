"""KV over a real bus: exported and imported bytes equal those of the pool, while another session runs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd import messages
from tests.support.cuda import cuda_device
from tests.support.exporting import ExportingEngine, filled
from tests.support.loaded import random_prompt
from tests.support.models import reduced_model

pytestmark = pytest.mark.gpu

PROMPT = random_prompt(700, 512, 0)


@pytest.fixture
def engine() -> Iterator[ExportingEngine]:
    with cuda_device() as device, ExportingEngine(device, max_batch_tokens=128, max_rows=16) as engine:
        yield engine


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("piece", [1, 32 << 20])
def test_kv_comes_back_as_it_left(
    engine: ExportingEngine, dtype: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("djinnd.engine.windows.window.WINDOW_PIECE_BYTES", piece)
    engine.loaded(reduced_model("llama-2"), dtype=dtype)
    engine.open("s")
    engine.open("other")
    tokens = PROMPT + engine.tokens("s", PROMPT, 8)
    kv = engine.export("s")
    running, exporting = engine.run_message("other", PROMPT[:20], 100), messages.ExportKv(engine.number(), "s")
    engine.send(running, exporting)
    engine.outcomes([running.request, exporting.request])
    assert isinstance(engine.import_("t", tokens, filled(kv)), messages.Finished)
    again = engine.export("t")
    for block in range(kv.layout.blocks):
        assert torch.equal(again.key(block), kv.key(block)) and torch.equal(again.value(block), kv.value(block))
    assert engine.tokens("t", [7], 8) == engine.tokens("s", [7], 8)
    engine.report()
