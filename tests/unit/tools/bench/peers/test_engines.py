from __future__ import annotations

from pathlib import Path

import pytest

from tools.bench.peers import engines, vllm
from tools.bench.peers.engines import Decoded, decode, loads, of_vllm
from tools.bench.peers.vllm import Answer, Load, Model, Ran
from tools.bench.stream.outcome import Status

WORK = {"context": 512, "tokens": 65, "sessions": (1, 16)}
MODEL = Model(checkpoint="/models/m", dtype="bfloat16", vocab=100, device="cuda:0", memory=1)


def ran(whole_s: float, step_s: float) -> Ran:
    return Ran(whole_s=whole_s, first_s=[0.0], between_s=[0.0], step_s=step_s)


def test_vllm_gets_a_first_token_and_the_steps_of_each_number_of_sessions() -> None:
    assert loads(WORK) == [
        Load(prompts=1, context=512, tokens=1, rounds=7),
        Load(prompts=1, context=512, tokens=65, rounds=3),
        Load(prompts=16, context=512, tokens=65, rounds=3),
    ]


def test_the_median_first_token_and_the_fastest_steps_count() -> None:
    rounds = [
        [ran(0.03, 0), ran(0.02, 0), ran(0.5, 0)],
        [ran(1, 0.004), ran(1, 0.003)],
        [ran(1, 0.006), ran(1, 0.008)],
    ]
    found = of_vllm(Answer(status=Status.MEASURED, rounds=rounds), (1, 16))
    assert found == Decoded(status=Status.MEASURED, first_token_ms=30.0, step_ms={1: 3.0, 16: 6.0})


def test_engines_that_are_not_there_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PACKAGE", "no_such_package")
    monkeypatch.setenv("PATH", str(tmp_path))
    for module in (engines, vllm):
        monkeypatch.setattr(module, "say", lambda progress: None)
    found = decode(MODEL, tmp_path / "m.gguf", WORK)
    assert {name: (each.status, each.note) for name, each in found.items()} == {
        "vLLM in-process": (Status.SKIPPED, "not installed"),
        "vLLM own process": (Status.SKIPPED, "not installed"),
        "llama.cpp with m.gguf": (Status.SKIPPED, "llama-bench is not on the PATH"),
    }


def test_a_failure_of_llama_cpp_is_its_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("llama-bench", "llama-batched-bench"):
        (tmp_path / name).write_text("#!/bin/sh\necho no such file >&2; exit 1\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    found = engines.of_llama(tmp_path / "m.gguf", "cpu", WORK)
    assert found == Decoded(status=Status.FAILED, note="llama-bench ended with code 1: no such file")
