"""The kernels that take longest to compile. `make cubins` compiles all kernels, and measures how long that takes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.variants import Variant
from tests.cubins import Attention, compile_apart, variants_of
from tests.support.compiled import HOPPER

PATHOLOGICAL = 60.0  # seconds of one core, however slow and busy; they take 10

pytestmark = [
    pytest.mark.kernels,
    pytest.mark.long,
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches would run"),
]


def longest(variants: list[Variant]) -> list[Variant]:
    """Two kernels: for a chunk, and for the most queries of a row. Of each, the last listed one that divides the
    keys."""
    dividing = [variant for variant in variants if "DIRECT=True" not in str(variant).replace("CHUNKS_DIRECT", "CHUNKS")]
    last = {variant.name: variant for variant in dividing if variant.name in ("chunks_kernel", "decode_kernel")}
    return [*last.values()]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    "attention",
    [
        Attention(HOPPER, torch.float32, 192, 7, 1),  # with larger tiles it took more than 30 s
        Attention(HOPPER, torch.bfloat16, 256, 8, 1),
    ],
    ids=str,
)
def test_compile_and_fit(attention: Attention, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    chosen = longest(variants_of(attention))
    assert len(chosen) == 2
    for variant in chosen:
        seconds, wrong = compile_apart(variant, attention.target, PATHOLOGICAL)
        assert not wrong, f"{variant}: {wrong} ({seconds:.1f} s)"
