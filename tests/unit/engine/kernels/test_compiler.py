from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from djinnd import messages
from djinnd.engine.kernels.compiler import Compiling, KernelCompiler
from djinnd.engine.run import prepare_model
from djinnd.model.kernels.fused.gate import gated
from djinnd.model.kernels.fused.rms_norm import rms_norm
from djinnd.model.kernels.launching.interpreter import INTERPRETED
from djinnd.model.kernels.launching.variants import Variant, is_compiled
from tests.support.compiled import HOPPER, SHARED_MEMORY, hopper
from tests.support.engine_thread import FOREVER, EngineThread
from tests.support.models import reduced_model

pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="kernels are interpreted in this process"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="launches would run"),
]


@pytest.fixture
def variants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Variant]]:
    """Two small variants, and a cache that has neither."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with hopper() as launches:
        with launches.listing() as listed:
            rms_norm(torch.ones(2, 64), torch.ones(64), 1e-5)
            gated(torch.ones(2, 64), torch.ones(2, 64), "silu")
        yield [*listed]


def compiler(seconds: float = 60.0, shared_memory: int = SHARED_MEMORY) -> KernelCompiler:
    return KernelCompiler(90, shared_memory, seconds)


def test_compiled_kernels_are_found_by_launches(variants: list[Variant]) -> None:
    told: list[tuple[int, int]] = []
    assert compiler().compile(variants, lambda done, total: told.append((done, total))) == {}
    assert all(is_compiled(variant, HOPPER) for variant in variants)
    assert (told[0], told[-1]) == ((0, 2), (2, 2)) and told == sorted(told)


def test_a_variant_that_takes_too_long_is_stopped(variants: list[Variant]) -> None:
    failed = compiler(seconds=0.001).compile(variants, lambda done, total: None)
    assert failed == dict.fromkeys(variants, "compiling it takes more than 0.001 s")


@pytest.mark.long
def test_a_variant_that_does_not_compile_fails_alone(variants: list[Variant]) -> None:
    broken = variants[0]._replace(specialization=variants[0].specialization.replace('"*fp32"', '"fp32"'))
    failed = compiler().compile([broken, variants[1]], lambda done, total: None)
    assert [*failed] == [broken] and "Error" in failed[broken]
    assert is_compiled(variants[1], HOPPER)


def children() -> list[int]:
    """Child processes that any thread of this process has started."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError):  # the thread has ended since
            found += map(int, (task / "children").read_text().split())
    return sorted(found)


def test_a_killed_process_fails_the_variants_that_are_left(variants: list[Variant]) -> None:
    before = children()

    def kill(done: int, total: int) -> None:
        for pid in set(children()).difference(before):
            os.kill(pid, signal.SIGKILL)

    failed = compiler().compile(variants, kill)
    assert set(failed) == set(variants) and all("ended" in reason for reason in failed.values())
    assert children() == before


def test_an_interrupted_compilation_leaves_no_process(variants: list[Variant]) -> None:
    before, woken = children(), threading.Event()
    compiling = Compiling(compiler(), variants, lambda done, total: None, woken.set)
    compiling.stop()
    assert compiling.is_over and woken.is_set() and set(compiling.failed) == set(variants)
    assert children() == before


# --- in an engine ---------------------------------------------------------------------------------------------------


class Held(KernelCompiler):
    """Compiles nothing until it is released, and then reports every variant as failed."""

    def __init__(self) -> None:
        super().__init__(90, SHARED_MEMORY, 60.0)
        self.go_on = threading.Event()

    def compile(self, variants: Sequence[Variant], told: Callable[[int, int], None]) -> dict[Variant, str]:
        told(0, len(variants))
        assert self.go_on.wait(FOREVER)
        return dict.fromkeys(variants, "compiling it takes more than 60 s")


def wanting(engine: EngineThread, monkeypatch: pytest.MonkeyPatch, missing: list[Variant]) -> Held:
    """From now on, the models of this engine lack these kernels."""
    held = Held()
    engine.engine._models._compiler = held
    monkeypatch.setattr(prepare_model, "_missing_kernels", lambda runner: missing)
    return held


def begin_load(engine: EngineThread, name: str) -> int:
    """Returns when the model's kernels are being compiled."""
    request = engine.number()
    engine.send(messages.Load(request, name, str(reduced_model("llama-2")), host_kv_bytes=0))
    while not (isinstance(told := engine.receive(), messages.Loading) and told.stage == "compiling"):
        if isinstance(told, messages.NeedArena):
            engine.send(engine.grant(told))
    assert (told.model, told.done, told.total) == (name, 0, 1)
    return request


def attention_variant(variants: list[Variant], name: str) -> Variant:
    return variants[0]._replace(module="djinnd.model.kernels.attention.decode", name=name, specialization=_NOTHING)


_NOTHING = '{"signature": {}, "constant_keys": [], "constant_vals": []}'


def test_other_models_step_meanwhile_and_the_model_serves_without_the_kernel(
    variants: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineThread() as engine:
        engine.loaded(reduced_model("llama-2"), "served")
        engine.open("s", "served")
        held = wanting(engine, monkeypatch, [attention_variant(variants, "decode_kernel")])
        request = begin_load(engine, "new")
        tokens, reply = engine.outcome(engine.run("s", [1, 2, 3], 20))
        assert len(tokens) == 20 and isinstance(reply, messages.Finished)
        engine.send(messages.SetBudget(99, engine.device.budget.total))
        assert "being loaded" in engine.until(messages.Failed).message
        held.go_on.set()
        loaded = engine.until(messages.Loaded, messages.Loading)
        assert loaded.request == request
        (note,) = [note for note in loaded.model.notes if "attention" in note]
        assert note.startswith("attention gathers pages, as decode_kernel") and "takes more than 60 s" in note


def test_a_model_is_refused_without_a_kernel_that_torch_cannot_replace(
    variants: list[Variant], monkeypatch: pytest.MonkeyPatch
) -> None:
    with EngineThread() as engine:
        held = wanting(engine, monkeypatch, [variants[0]])
        request = begin_load(engine, "new")
        held.go_on.set()
        refused = engine.until(messages.Failed, messages.Loading)
        assert refused.request == request and "needs the kernel rms_norm_kernel" in refused.message
        assert engine.report().used_bytes == 0


def test_an_engine_may_end_during_a_compilation(variants: list[Variant], monkeypatch: pytest.MonkeyPatch) -> None:
    with EngineThread() as engine:
        held = wanting(engine, monkeypatch, [variants[0]])
        begin_load(engine, "new")
        engine.send(messages.Shutdown())
        held.go_on.set()
        engine.join()
