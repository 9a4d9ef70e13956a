from __future__ import annotations

import importlib.util
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tools.bench.peers import vllm
from tools.bench.peers.vllm import Answer, Job, Load, Model, both_ways, engine_options, environment, measure, run
from tools.bench.stream.outcome import Status

MODEL = Model(checkpoint="/models/m", dtype="bfloat16", vocab=100, device="cuda:0", memory=40 << 30)
LOADS = [Load(prompts=1, context=512, tokens=1, rounds=7), Load(prompts=16, context=512, tokens=65, rounds=3)]


def test_without_vllm_both_ways_say_that_it_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PACKAGE", "no_such_package")
    monkeypatch.setattr(vllm, "say", lambda progress: None)
    absent = Answer(status=Status.SKIPPED, note="not installed")
    assert both_ways(MODEL, LOADS) == {"vLLM in-process": absent, "vLLM own process": absent}


def test_another_device_than_vllms_own_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PACKAGE", "json")
    cpu = Model(checkpoint="/models/m", dtype="bfloat16", vocab=100, device="cpu", memory=1)
    found = run(Job(model=cpu, own_process=True, loads=LOADS, answer=str(tmp_path / "answer.json")))
    assert found == Answer(status=Status.SKIPPED, note="measured on cuda:0 only")


@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("vllm") is not None, reason="vLLM is installed")
def test_a_process_that_ends_without_an_answer_is_a_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "PACKAGE", "json")  # the process itself still wants vLLM
    found = run(Job(model=MODEL, own_process=False, loads=LOADS, answer=str(tmp_path / "answer.json")))
    note = "exit code 1: ModuleNotFoundError: No module named 'vllm'"
    assert found == Answer(status=Status.FAILED, note=note)


def test_the_engine_has_the_daemons_memory_and_room_for_the_largest_load() -> None:
    assert engine_options(MODEL, LOADS, 80 << 30) == {
        "model": "/models/m",
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "gpu_memory_utilization": 0.5,
        "max_model_len": 577,
        "max_num_seqs": 16,
        "enforce_eager": False,
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }


@pytest.mark.parametrize(("own_process", "told"), [(False, "0"), (True, "1")])
def test_the_environment_says_where_the_engine_runs(own_process: bool, told: str) -> None:
    assert environment(own_process=own_process)["VLLM_ENABLE_V1_MULTIPROCESSING"] == told


class Engine:
    """Stands for vLLM's LLM: each prompt of a call gets its first token a second after the one before it, then a token
    every `call` seconds, where calls are counted from 1."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self._calls = count(1)

    def generate(self, prompts: list[dict[str, list[int]]], options: dict[str, Any], use_tqdm: bool) -> list[Any]:
        assert not use_tqdm and options["ignore_eos"] and options["temperature"] == 0.0
        self.prompts += [prompt["prompt_token_ids"] for prompt in prompts]
        between = next(self._calls)
        return [
            SimpleNamespace(
                metrics=SimpleNamespace(
                    first_token_latency=at + 1.0,
                    first_token_ts=100.0 + at,
                    last_token_ts=100.0 + at + (between + at) * (options["max_tokens"] - 1),
                )
            )
            for at in range(len(prompts))
        ]


def test_each_load_is_measured_after_a_round_that_warms_up() -> None:
    engine, seeds = Engine(), count()
    load = Load(prompts=2, context=3, tokens=5, rounds=2)
    ((one, two),) = measure(engine, dict, [load], lambda tokens: [next(seeds)] * tokens)
    assert [one.between_s, two.between_s] == [[2.0, 3.0], [3.0, 4.0]]
    assert [one.step_s, two.step_s] == [3.0, 4.0]  # of the prompt with the latest first token
    assert one.first_s == [1.0, 2.0]
    assert engine.prompts == [[seed] * 3 for seed in range(6)]


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    load = Load(prompts=1, context=3, tokens=1, rounds=1)
    ((ran,),) = measure(Engine(), dict, [load], lambda tokens: [0] * tokens)
    assert (ran.between_s, ran.step_s) == ([0.0], 0.0)
