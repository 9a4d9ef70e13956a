"""Steps that are launched before the tokens of the last one are read give the same tokens, in graphs and eagerly."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from djinnd.engine import tuning
from djinnd.model.step.last_tokens import LastTokens
from tests.support.cuda import cuda_device
from tests.support.engine_thread import EngineThread
from tests.support.followed import lives, noted
from tests.support.models import reduced_model

pytestmark = pytest.mark.gpu

VOCAB = 512
CYCLES = 10_000_000  # of a card's clock: about 5 ms


def tokens_of(family: str, temperature: float) -> list[tuple[list[int], str, int]]:
    with cuda_device() as device, EngineThread(device, max_batch_tokens=128, max_rows=16) as engine:
        engine.loaded(reduced_model(family), dtype="float32", max_context=512)
        found = lives(engine, VOCAB, temperature)
        engine.report()
        return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("family", ["llama-2", "mixtral"])
def test_sessions_that_join_and_leave_get_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch, family: str, temperature: float
) -> None:
    expected = tokens_of(family, temperature)
    monkeypatch.setitem(tuning.LAUNCHES_AHEAD, "cuda", True)
    steps = noted(monkeypatch)
    assert tokens_of(family, temperature) == expected
    assert len(steps) > 20


def test_a_device_that_is_late_gets_the_inputs_of_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two steps the device does something else for 5 ms, as with another process on it. The host has the
    results of one step long before the device takes the inputs of the next."""
    expected = tokens_of("llama-2", 0.0)
    keep = LastTokens.keep

    def late(tokens: LastTokens, given: torch.Tensor) -> None:
        torch.cuda._sleep(CYCLES)
        keep(tokens, given)

    monkeypatch.setattr(LastTokens, "keep", late)
    steps = noted(monkeypatch)
    assert tokens_of("llama-2", 0.0) == expected
    assert len(steps) > 20
