from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.gguf_files import write_as_gguf
from tests.support.models import tiny_model
from tools.bench.peers import llama_bench
from tools.bench.peers.llama_bench import LlamaBench, LlamaFailed, missing, samples, steps

# Written by llama.cpp 0c1e570 for SmolLM2-135M in Q4_1 on one thread. Most of llama-bench's settings are left out.
ONE = """[
  {
    "build_commit": "0c1e570",
    "build_number": 1,
    "cpu_info": "Intel(R) Xeon(R) Processor",
    "gpu_info": "",
    "backends": "CPU",
    "model_type": "llama 256M Q4_1",
    "model_size": 96576768,
    "model_n_params": 134515008,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_threads": 1,
    "devices": "none",
    "repack": true,
    "n_prompt": 64,
    "n_gen": 0,
    "n_depth": 0,
    "test_time": "2026-11-29T06:26:05Z",
    "avg_ns": 347385280,
    "stddev_ns": 6340124,
    "avg_ts": 184.264171,
    "stddev_ts": 3.362974,
    "samples_ns": [ 351868387, 342902174 ],
    "samples_ts": [ 181.886, 186.642 ]
  }
]
"""
SEVERAL = """
{"n_kv_max": 1024, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, "n_gpu_layers": -1, \
"n_threads": 1, "n_threads_batch": 1, "pp": 32, "tg": 8, "pl": 4, "n_kv": 160, "t_pp": 0.724312, \
"speed_pp": 176.719421, "t_tg": 0.292892, "speed_tg": 109.255287, "t": 1.017204, "speed": 157.293915}
{"n_kv_max": 1024, "n_batch": 2048, "n_ubatch": 512, "flash_attn": -1, "is_pp_shared": 0, "n_gpu_layers": -1, \
"n_threads": 1, "n_threads_batch": 1, "pp": 32, "tg": 8, "pl": 4, "n_kv": 160, "t_pp": 0.736487, \
"speed_pp": 173.798050, "t_tg": 0.289828, "speed_tg": 110.410309, "t": 1.026315, "speed": 155.897552}

"""


def program(folder: Path, name: str, script: str) -> None:
    """Puts a shell script in the place of one of llama.cpp's programs."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def test_every_repetition_has_its_seconds() -> None:
    assert samples(ONE) == [0.351868387, 0.342902174]


def test_every_line_of_a_batch_has_the_seconds_of_its_step() -> None:
    """A step gives a token to each of the 4 sequences: their tokens a second are in "speed_tg"."""
    assert steps(SEVERAL) == pytest.approx([4 / 109.255287, 4 / 110.410309])


def test_the_arguments_say_what_is_measured() -> None:
    assert " ".join(llama_bench.prompt_arguments(512, 5)) == "-p 512 -n 0 -r 5 -o json"
    assert " ".join(llama_bench.decode_arguments(128, 33, 5)) == "-p 0 -n 32 -d 128 -r 5 -o json"
    batch = "-npp 128 -ntg 32 -npl 8,8,8 -c 1288 --output-format jsonl"
    assert " ".join(llama_bench.batch_arguments(8, 128, 33, 3)) == batch


@pytest.mark.parametrize(("device", "place"), [("cpu", "-dev none"), ("cuda:0", "-ngl 99")])
def test_a_gpu_has_all_blocks_and_the_cpu_has_no_gpu(
    device: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = tmp_path / "told"
    program(tmp_path, "llama-bench", f'echo "$*" > {told}\necho \'[{{"samples_ns": [2000000]}}]\'')
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert LlamaBench(Path("m.gguf"), 2, device).step(1, context=128, tokens=3) == 1e-3
    assert told.read_text().strip() == f"-m m.gguf -t 2 {place} -p 0 -n 2 -d 128 -r 1 -o json"


def test_the_program_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert missing((1,)) == "llama-bench"
    program(tmp_path, "llama-bench", "exit 0")
    assert missing((1,)) is None
    assert missing((1, 8)) == "llama-batched-bench"


def test_a_failure_has_the_last_line_that_the_program_wrote(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program(tmp_path, "llama-bench", "echo loading >&2; echo 'error: failed to load model' >&2; exit 1")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    with pytest.raises(LlamaFailed, match=r"^llama-bench ended with code 1: error: failed to load model$"):
        LlamaBench(Path("m.gguf"), 1, "cpu").first_token(64)


@pytest.mark.skipif(shutil.which("llama-bench") is None, reason="llama-bench is not on the PATH")
def test_a_model_is_measured_by_llama_cpp_itself(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    path = tmp_path / "tiny.gguf"
    write_as_gguf(tiny_model(), path, "llama")
    llama = LlamaBench(path, 1, "cpu")
    assert 0 < llama.first_token(64, runs=2) < 10
    assert 0 < llama.step(1, context=16, tokens=9) < 10
    if missing((1, 2)) is None:
        assert 0 < llama.step(2, context=16, tokens=9, runs=2) < 10
