from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from tools.results.experiments import EXPERIMENTS, experiment_of
from tools.results.raw import FOLDER, ROOT, Report, read_all
from tools.results.serving import cpu_peers, decode_peers


@pytest.mark.parametrize("module", sorted({each.module for each in EXPERIMENTS.values()}))
def test_the_bench_of_every_experiment_exists(module: str) -> None:
    assert importlib.util.find_spec(module) is not None


def test_files_that_the_commands_name_exist() -> None:
    commands = [experiment_of(each.experiment).command(each) for each in read_all(FOLDER)]
    files = [word for command in commands for word in command.split() if word.endswith(".yaml")]
    assert files
    assert [file for file in files if not (ROOT / file).exists()] == []


def report(results: dict[str, Any], **parameters: Any) -> Report:
    where: dict[str, Any] = {"at": "2026-11-29T10:00:00Z", "commit": "abc", "hardware": "CPU", "software": "Python"}
    return Report(experiment="any", parameters=parameters, results=results, summary="", **where)


def test_engines_beside_transformers_are_in_its_cell_if_they_were_measured() -> None:
    transformers = {"first_token_ms": 32.9, "step_ms": {"1": 24.2}}
    engines = {
        "vLLM in-process": {"first_token_ms": 25.0, "step_ms": {"1": 6.9}},
        "vLLM own process": {"first_token_ms": None, "step_ms": {}},
    }
    alone = "transformers' `generate`: first token 32.9 ms; step 24.2 ms of 1"
    assert decode_peers(report({"transformers": transformers})) == alone
    told = decode_peers(report({"transformers": transformers, "engines": engines}))
    assert told == alone + "<br>vLLM in-process: first token 25.0 ms; step 6.90 ms of 1"


def test_llama_cpp_is_named_with_its_file() -> None:
    times = {"djinnd": [10.0], "transformers": [20.0]}
    alone = "transformers' `generate`: step of 1 20.0 ms"
    assert cpu_peers(report({"ms": {"step of 1": times}}, gguf="m-Q8_0.gguf")) == alone
    times["llama.cpp"] = [5.0]
    told = cpu_peers(report({"ms": {"step of 1": times}}, gguf="m-Q8_0.gguf"))
    assert told == alone + "<br>llama.cpp with m-Q8_0.gguf: step of 1 5.00 ms"
