from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from djinnd.model.attention.triton_attention import TritonAttention
from djinnd.model.kernels.attention import fp8
from djinnd.model.kernels.fused.rms_norm import rms_norm
from djinnd.model.kernels.launching import scratch
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.launches import KernelUnavailable, Launches
from djinnd.model.kernels.launching.variants import compile_variant, is_compiled
from djinnd.model.paged_batch import Softmax
from tests.support.compiled import HOPPER, hopper
from tests.support.paged import Scene, check

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches would run"),
]


@pytest.fixture
def launches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Launches]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with hopper() as launches:
        yield launches


def norm(dtype: torch.dtype = torch.float32, width: int = 64) -> Tensor:
    return rms_norm(torch.ones(2, width, dtype=dtype), torch.ones(width, dtype=dtype), 1e-5)


def test_a_listing_has_each_variant_once_and_launches_none(launches: Launches) -> None:
    with launches.listing() as listed:
        for dtype in (torch.float32, torch.bfloat16, torch.float32):
            norm(dtype)
    assert [str(variant) for variant in listed] == [
        "rms_norm_kernel (fp32, WIDTH=64, BLOCK=64, SCALE=0, GATE=0, GROUPS=1, PARTS=1, AT_ONCE=16)",
        "rms_norm_kernel (bf16, WIDTH=64, BLOCK=64, SCALE=0, GATE=0, GROUPS=1, PARTS=1, AT_ONCE=16)",
    ]


def test_only_the_thread_of_a_listing_is_listing(launches: Launches) -> None:
    with ThreadPoolExecutor(1) as other:
        for leave_out in (True, False):
            with launches.listing(leave_out=leave_out):
                assert launches.is_listing and not other.submit(lambda: launches.is_listing).result()
            assert not launches.is_listing


@pytest.mark.parametrize(("converts", "read"), [(True, "*fp8e4nv"), (False, "*u8")])
def test_kernels_get_pages_in_fp8_as_such_only_if_the_processor_converts_them(
    launches: Launches, monkeypatch: pytest.MonkeyPatch, converts: bool, read: str
) -> None:
    monkeypatch.setattr(fp8, "has_fp8", lambda device: converts)
    monkeypatch.setattr(scratch, "processors", lambda device: 132)
    attention = TritonAttention(torch.device("cpu"))
    with launches.listing() as listed:
        for rows in (([1, 1], [40, 300]), ([30], [300])):
            scene = Scene(*rows, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn)
            attention.write(scene.k, scene.v, scene.keys, scene.values, scene.batch())
            attention.attend(scene.q, None, None, scene.keys, scene.values, scene.batch(), Softmax(0.1))
    types = {variant.name: json.loads(variant.specialization)["signature"].get("keys") for variant in listed}
    assert types["kv_write_kernel"] == "*u8" and types["decode_kernel"] == read
    assert types["chunks_kernel"] == types["singles_kernel"] == read


def test_a_compiled_variant_is_not_listed_again(launches: Launches) -> None:
    with launches.listing() as listed:
        norm()
    (variant,) = listed
    assert not is_compiled(variant, HOPPER)
    compile_variant(variant, HOPPER)
    with (
        launches.listing() as listed,
        pytest.raises(AttributeError, match="launcher"),
    ):  # the launch fails: there is no GPU
        norm()
    assert not listed


def test_in_a_trial_a_launch_raises_and_is_listed(launches: Launches) -> None:
    with launches.listing(leave_out=False) as listed, pytest.raises(KernelUnavailable, match="not compiled yet"):
        norm()
    assert len(listed) == 1


def test_a_variant_that_cannot_be_compiled_is_tried_once_for_each_listing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    tried: list[object] = []

    def fails(variants: Any, told: object) -> dict[Any, str]:
        tried.extend(variants)
        return dict.fromkeys(variants, "ptxas has crashed")

    with hopper(fails) as launches:
        for _ in range(2):
            with pytest.raises(KernelUnavailable, match=r"rms_norm_kernel \(fp32, WIDTH=64.*: ptxas has crashed"):
                norm()
        assert len(tried) == 1
        with launches.listing() as listed:
            norm()
        assert [*listed] == tried
        launches.settle([*listed], {})  # this time it was compiled
        compile_variant(next(iter(listed)), HOPPER)
        with pytest.raises(AttributeError, match="launcher"):
            norm()


@pytest.mark.parametrize("options", [{}, {"window": 20, "softcap": 3.0}], ids=str)
@pytest.mark.parametrize("counts", [[1, 1, 1], [1, 9, 17]], ids=["decode", "mixed"])
def test_attention_falls_back_to_torch_without_its_kernels(
    launches: Launches, counts: list[int], options: dict[str, Any]
) -> None:
    scene = Scene(counts, [5, 40, 60], group=2)
    check(TritonAttention(torch.device("cpu")), scene, **options)
